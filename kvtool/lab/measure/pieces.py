"""A text as pieces of whole characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def pieces(ids: Sequence[int], weights: Sequence[float], tokenizer: Any) -> Iterator[tuple[str, float]]:
    """A text in pieces of whole characters, each with the largest weight of its tokens."""
    start = 0
    for stop in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[start:stop]), clean_up_tokenization_spaces=False)
        if not text.endswith("\ufffd") or stop == len(ids):
            yield text, max(weights[start:stop])
            start = stop
