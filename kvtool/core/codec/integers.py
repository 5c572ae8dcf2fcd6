"""Whole numbers between the transform and the entropy coder: nesting, symbols, escapes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.entropy.tables import ESCAPE, ZERO, TableSet
from kvtool.core.codec.payload import MOST_NUMBER

I16 = npt.NDArray[np.int16]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]


def coarsened(numbers: I16, levels: int = 1) -> I16:
    """Numbers of a level whose steps are 3 ** levels times as wide: the nearest, and nested by construction."""
    for _ in range(levels):
        numbers = np.floor_divide(numbers + np.int16(1), np.int16(3))
    return numbers


def clipped(values: npt.NDArray[np.float32]) -> I16:
    """The nearest whole numbers; what is beyond int16 ends there."""
    return np.clip(np.rint(values), -MOST_NUMBER, MOST_NUMBER - 1).astype(np.int16)


def bounds(tables: TableSet) -> tuple[I16, I16]:
    """Least and largest number that each table has a symbol for, int16 `[tables]`; between them it has all."""
    there = tables.frequencies[:, :ESCAPE] > 0
    first = there.argmax(1)
    last = ESCAPE - 1 - there[:, ::-1].argmax(1)
    empty = ~there.any(1)  # then everything is an escape
    low, high = np.where(empty, 1, first - ZERO), np.where(empty, 0, last - ZERO)
    return low.astype(np.int16), high.astype(np.int16)


def to_symbols(numbers: I16, ids: U16, limits: tuple[I16, I16]) -> tuple[U8, npt.NDArray[np.bool_]]:
    """Symbols `[rows, columns]`, and where they are escapes."""
    low, high = limits[0][ids], limits[1][ids]
    # One comparison for both limits: from the least on, whatever lies below it is huge without a sign.
    escapes = (numbers - low).view(np.uint16) >= (high - low + np.int16(1)).view(np.uint16)
    symbols = numbers.astype(np.uint8) + np.uint8(ZERO)
    np.copyto(symbols, np.uint8(ESCAPE), where=escapes)
    return symbols, escapes


def refinement(fine: I16, coarse: I16) -> tuple[U8, U8]:
    """Symbols and contexts that lead from the coarser numbers to the finer ones (see coder.refine_batch)."""
    rest = fine - 3 * coarse
    rest[coarse < 0] *= -1
    return (rest + np.int16(ZERO)).astype(np.uint8), np.minimum(np.abs(coarse), 2).astype(np.uint8)
