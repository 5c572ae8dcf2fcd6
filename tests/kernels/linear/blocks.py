"""Blocks of GGUF files, every bit at random."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

# Where a block has its float16 numbers.
HALVES = {"q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2)}
HALVES |= {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
ROWS, COLUMNS = 3, 512


def random_blocks(kind: str) -> npt.NDArray[np.uint8]:
    """The blocks of a tensor `[ROWS, COLUMNS]`, its scales and group_mins of the usual size."""
    chance = np.random.default_rng(0)
    size, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    blocks = chance.integers(0, 256, (ROWS * COLUMNS // size, width), dtype=np.uint8)
    for start in HALVES[kind]:
        halves = chance.normal(0, 0.01, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = halves[:, None].view(np.uint8)
    return blocks
