"""Whole numbers between the transform and the entropy coder: nesting, ends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.payload import MOST_NUMBER

I16 = npt.NDArray[np.int16]


def coarsened(numbers: I16, levels: int = 1) -> I16:
    """Numbers of a level whose steps are 3 ** levels times as wide: the nearest, and nested by construction."""
    for _ in range(levels):
        numbers = np.floor_divide(numbers + np.int16(1), np.int16(3))
    return numbers


def clipped(values: npt.NDArray[np.float32]) -> I16:
    """The nearest whole numbers; what is beyond int16 ends there."""
    return np.clip(np.rint(values), -MOST_NUMBER, MOST_NUMBER - 1).astype(np.int16)
