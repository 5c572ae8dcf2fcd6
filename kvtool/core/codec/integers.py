"""Whole numbers between the transform and the entropy coder: nesting, symbols, escapes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.entropy.tables import ZERO
from kvtool.core.codec.payload import MOST_NUMBER

I16 = npt.NDArray[np.int16]
U8 = npt.NDArray[np.uint8]


def coarsened(numbers: I16, levels: int = 1) -> I16:
    """Numbers of a level whose steps are 3 ** levels times as wide: the nearest, and nested by construction."""
    for _ in range(levels):
        numbers = np.floor_divide(numbers + np.int16(1), np.int16(3))
    return numbers


def clipped(values: npt.NDArray[np.float32]) -> I16:
    """The nearest whole numbers; what is beyond int16 ends there."""
    return np.clip(np.rint(values), -MOST_NUMBER, MOST_NUMBER - 1).astype(np.int16)


def refinement(fine: I16, coarse: I16) -> tuple[U8, U8]:
    """Symbols and contexts that lead from the coarser numbers to the finer ones (see decoder.refine)."""
    rest = fine - 3 * coarse
    rest[coarse < 0] *= -1
    return (rest + np.int16(ZERO)).astype(np.uint8), np.minimum(np.abs(coarse), 2).astype(np.uint8)
