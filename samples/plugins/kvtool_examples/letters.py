"""An embedder: texts are alike when they share runs of three letters. No model, and no word has to be whole."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

_DIMENSIONS = 512


class Letters:
    """Counts of three-letter runs, hashed into a few dimensions (feature hashing, arXiv 0902.2206)."""

    digest = "letters1"  # another one whenever the same text gets another vector

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors, float32 `[texts, dimensions]`; kvtool brings them to length 1."""
        vectors = np.zeros((len(texts), _DIMENSIONS), np.float32)
        for row, text in zip(vectors, texts, strict=True):
            words = f" {' '.join(text.lower().split())} "
            for at in range(len(words) - 2):
                digest = zlib.crc32(words[at : at + 3].encode())
                row[digest % _DIMENSIONS] += 1 if digest >> 31 else -1
        return vectors
