"""Whole numbers to symbols, of several layers in one call. What comes back may be this thread's scratch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.entropy import encode_ir, native
from kvtool.core.codec.entropy.columns import Columns
from kvtool.core.codec.entropy.reference import BLOCK, MOST_CONTEXT, U8
from kvtool.core.codec.entropy.tables import ESCAPE, ZERO
from kvtool.core.native.job import Job, Jobs, address, scratch

I16 = npt.NDArray[np.int16]
I32 = npt.NDArray[np.int32]


def to_symbols(numbers: I16, columns: Columns) -> tuple[U8, I16]:
    """Symbols `[rows, columns]` of numbers `[rows, stride]`, which are where a decoder would put them; one layer's.

    Returns
    -------
    The symbols, ESCAPE where a column's table does not have the number; and the numbers that these stand for, row by
    row.

    Raises
    ------
    ValueError : numbers that are not int16, or too few.
    """
    if numbers.ndim != 2:
        raise ValueError("numbers are [rows, stride]")
    ((symbols, marked),) = symbols_of(numbers[None], [columns])
    return symbols.copy(), marked


def symbols_of(numbers: I16, columns: Sequence[Columns]) -> list[tuple[U8, I16]]:
    """What `to_symbols` makes, of numbers `[layers, rows, stride]`; symbols are this thread's memory."""
    _check(numbers, columns)
    kernel = native.kernel(native.SYMBOLS)
    if kernel is None or numbers.strides[2] != numbers.itemsize:
        return [_in_numpy(some, of) for some, of in zip(numbers, columns, strict=True)]
    rows = numbers.shape[1]
    symbols = _cut("symbols", rows, columns)
    marked = scratch("marked", sum(part.size for part in symbols), np.int16)
    starts = [end - part.size for end, part in zip(accumulate(part.size for part in symbols), symbols, strict=True)]
    some = [number for number, part in enumerate(symbols) if part.size]
    counts = np.zeros(len(symbols), np.int64)
    held = [columns[number].held for number in some]
    first = np.array(starts, np.int64)[some]
    jobs = _jobs(encode_ir.SYMBOLS, numbers, columns, some)
    jobs.set(
        low=[one.low for one in held],
        many=[one.many for one in held],
        symbols=address(symbols[0]) + first,
        escapes=address(counts) + counts.itemsize * np.array(some, np.int64),
        marked=address(marked) + marked.itemsize * first,
    )
    jobs.run(kernel)
    return [
        (part, marked[start : start + count].copy())
        for part, start, count in zip(symbols, starts, counts.tolist(), strict=True)
    ]


def finer_symbols(numbers: I16, coarse: I16, columns: Sequence[Columns]) -> list[tuple[U8, U8]]:
    """What leads from coarser numbers to finer ones, both `[layers, rows, stride]` (see decoder.refine): symbols and
    contexts `[rows, columns]`, this thread's memory."""
    _check(numbers, columns)
    _check(coarse, columns)
    kernel = native.kernel(native.FINER)
    if kernel is None:
        return [
            refinement(*(np.ascontiguousarray(part[:, of.numbers]) for part in (fine, wide)))
            for fine, wide, of in zip(numbers, coarse, columns, strict=True)
        ]
    symbols, contexts = (_cut(name, numbers.shape[1], columns) for name in ("symbols", "contexts"))
    some = [number for number, part in enumerate(symbols) if part.size]
    jobs = _jobs(encode_ir.FINER, numbers, columns, some)
    jobs.set(
        coarse=address(coarse) + coarse.strides[0] * np.array(some, np.int64),
        symbols=[address(symbols[number]) for number in some],
        contexts=[address(contexts[number]) for number in some],
    )
    jobs.run(kernel)
    return list(zip(symbols, contexts, strict=True))


def wider(numbers: I16, out: I16) -> I16:
    """Numbers of a level whose steps are three times as wide: the nearest, and nested by construction.

    Parameters
    ----------
    numbers, out : any shape, a multiple of 32 in all, C order; numbers from -32767 to 32766.
    """
    kernel = native.kernel(native.WIDER)
    if kernel is None or numbers.size % BLOCK or not numbers.size:
        out[...] = np.floor_divide(numbers + np.int16(1), np.int16(3))
        return out
    jobs = Jobs(encode_ir.WIDER, 1)
    jobs.set(numbers=address(numbers), out=address(out), blocks=numbers.size // BLOCK)
    jobs.run(kernel)
    return out


def has_strays(numbers: I16, places: Sequence[I32]) -> list[bool]:
    """Whether numbers `[layers, rows, stride]` have any other than 0 in some blocks, which begin at `places`."""
    kernel = native.kernel(native.STRAY)
    if kernel is None:
        return [
            any(bool(rows[:, place : place + BLOCK].any()) for place in some)
            for rows, some in zip(numbers, places, strict=True)
        ]
    found = np.zeros(len(numbers), np.int64)
    some = [number for number, blocks in enumerate(places) if len(blocks) and numbers.shape[1]]
    jobs = Jobs(encode_ir.STRAY, len(some))
    jobs.set(
        numbers=address(numbers) + numbers.strides[0] * np.array(some, np.int64),
        stride=numbers.strides[1],
        places=[address(places[number]) for number in some],
        rows=numbers.shape[1],
        blocks=[len(places[number]) for number in some],
        some=address(found) + found.itemsize * np.array(some, np.int64),
    )
    jobs.run(kernel)
    return [bool(one) for one in found]


def _check(numbers: I16, columns: Sequence[Columns]) -> None:
    fits = numbers.ndim == 3 and len(numbers) == len(columns)
    if not fits or numbers.dtype != np.int16 or max((of.reach for of in columns), default=0) > numbers.shape[2]:
        raise ValueError("numbers are int16 [layers, rows, stride], as wide as the columns reach")


def _cut(name: str, rows: int, columns: Sequence[Columns]) -> list[U8]:
    """This thread's memory, cut into `[rows, columns]` for each layer."""
    widths = [of.ids.shape[0] for of in columns]
    ends = list(accumulate(rows * width for width in widths))
    whole = scratch(name, ends[-1] if ends else 0, np.uint8)
    return [whole[end - rows * width : end].reshape(rows, width) for end, width in zip(ends, widths, strict=True)]


def _jobs(job: Job, numbers: I16, columns: Sequence[Columns], some: Sequence[int]) -> Jobs:
    """Jobs of some layers, with the fields that all kernels of numbers have."""
    jobs = Jobs(job, len(some))
    jobs.set(
        numbers=address(numbers) + numbers.strides[0] * np.array(some, np.int64),
        stride=numbers.strides[1],
        places=[columns[number].held.places for number in some],
        rows=numbers.shape[1],
        blocks=[columns[number].ids.shape[0] // BLOCK for number in some],
    )
    return jobs


# ---- without machine code ----------------------------------------------------------------------------------------


def _in_numpy(numbers: I16, columns: Columns) -> tuple[U8, I16]:
    low, many = columns.limits
    taken = np.ascontiguousarray(numbers[:, columns.numbers])
    escapes = (taken - low).view(np.uint16) >= many.view(np.uint16)
    symbols = np.where(escapes, np.uint8(ESCAPE), taken.astype(np.uint8) + np.uint8(ZERO))
    return symbols, taken[escapes]


def refinement(fine: I16, coarse: I16) -> tuple[U8, U8]:
    """Symbols and contexts that lead from coarser numbers to finer ones (see decoder.refine); by numpy."""
    rest = fine - 3 * coarse
    rest[coarse < 0] *= -1
    return (rest + np.int16(ZERO)).astype(np.uint8), np.minimum(np.abs(coarse), MOST_CONTEXT).astype(np.uint8)
