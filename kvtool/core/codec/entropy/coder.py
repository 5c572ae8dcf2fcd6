"""Encode and decode streams, as fast as this machine can; what the bytes are: reference.py.

Everything is checked here, before a kernel that checks nothing sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.entropy import ir_decode, ir_encode, native, reference
from kvtool.core.codec.entropy.ir_output import BLOCK, MOST_CONTEXT
from kvtool.core.codec.entropy.reference import LANES, LEAST_STATE, U8, U16, U32, Stream
from kvtool.core.codec.entropy.tables import ALPHABET, SLOTS, ZERO, TableSet
from kvtool.core.errors import DamagedError

Form = Literal["int16", "bfloat16", "float16"]
I64 = npt.NDArray[np.int64]

_HELD: dict[str, np.dtype[Any]] = {
    "int16": np.dtype(np.int16),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
}
_BEHIND = np.zeros(LANES, np.uint16)  # a kernel may read this much behind the words
_AT_ONCE = 64  # streams in one call: their copied words stay in the cache
_ROWS = list(ir_decode.FIELDS).index("rows")
_SLACK = 16  # words an encoder may write behind the last: those of a register
_entries: WeakKeyDictionary[TableSet, U32] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Decoding:
    """One stream to decode into a place of a larger array.

    Parameters
    ----------
    stream : its words and states may be views of a read-only buffer.
    ids : table of each column, uint16 `[columns]`; columns are a multiple of 64.
    rows : of the stream and of `out`.
    places : int32 `[columns / 32]`: at which column of `out` each block of 32 columns begins; blocks do not overlap.
    out : `[rows, stride]`, rows of contiguous numbers; int16, or uint16 that holds bfloat16 bits, or float16.
    form : what `out` holds.
    scale, offset : float32 `[columns]`, finite; of the float forms only. A value is number * scale + offset, where the
        product, the sum and the result are each rounded to nearest, ties to even.
    """

    stream: Stream
    ids: U16
    tables: TableSet
    rows: int
    places: npt.NDArray[np.int32]
    out: npt.NDArray[Any]
    form: Form = "int16"
    scale: npt.NDArray[np.float32] | None = None
    offset: npt.NDArray[np.float32] | None = None


def decode_batch(jobs: Sequence[Decoding]) -> None:
    """Decode streams, one core; other threads run meanwhile. A number is its symbol - 128.

    Raises
    ------
    DamagedError : a stream, its ids, scales or offsets are not what an encoder made; every `out` may hold anything.
    ValueError : arrays of the wrong shape or type, or places outside `out`.
    UsageError : see native.chosen.
    """
    if any(job.form not in ir_decode.FORMS for job in jobs):
        raise ValueError("an unknown form")
    for form in ir_decode.FORMS:
        _decode(form, [job for job in jobs if job.form == form])


def refine_batch(jobs: Sequence[Decoding]) -> None:
    """Refine coarser numbers q, which `out` (int16) holds at the places: q becomes 3q + r, or 3q - r where q < 0.

    The context of a symbol is min(|q|, 2); r is symbol - 128. What does not fit int16 wraps.

    Raises
    ------
    As decode_batch; the last two tables are no column's: its id + 2 must be a table.
    """
    if any(job.form != "int16" for job in jobs):
        raise ValueError("only int16 can be refined")
    _decode(ir_decode.REFINE, jobs)


def encode(symbols: U8, ids: U16, tables: TableSet, contexts: U8 | None = None) -> Stream:
    """Encode symbols `[rows, columns]`; the same bytes as reference.encode, and its parameters.

    Raises
    ------
    ValueError : a symbol whose table gives it no frequency, a table that is not there, or arrays of the wrong shape.
    """
    _check_symbols(symbols, ids, tables, contexts)
    kernel = native.kernel(native.ENCODE if contexts is None else native.ENCODE_CONTEXTS)
    if kernel is None or not symbols.size:
        return reference.encode(symbols, ids, tables, contexts)
    rows, columns = symbols.shape
    states = np.full(LANES, LEAST_STATE, np.uint32)
    words = np.empty(symbols.size + _SLACK, np.uint16)
    counts = np.zeros(2, np.int64)
    bases = ids[::-1].astype(np.uint32) * np.uint32(ALPHABET)
    entries = _encoder_entries(tables)
    end = symbols.size  # symbols and contexts are bytes
    values = {
        "symbols": _address(symbols) + end,
        "contexts": 0 if contexts is None else _address(contexts) + end,
        "bases": _address(bases),
        "entries": _address(entries),
        "states": _address(states),
        "words": _address(words),
        "rows": rows,
        "groups": columns // LANES,
        "written": _address(counts),
        "missing": _address(counts) + counts.itemsize,
    }
    job = np.array([values[name] for name in ir_encode.FIELDS], np.int64)
    kernel(_address(job), 1)
    if int(counts[1]) & (1 << 31):
        raise ValueError("a symbol that its table does not have")
    return Stream(np.ascontiguousarray(words[: counts[0]][::-1]), np.ascontiguousarray(states[::-1]))


def _decode(kind: str, jobs: Sequence[Decoding]) -> None:
    for job in jobs:
        _check_output(job)
    for first in range(0, len(jobs), _AT_ONCE):
        _decode_some(kind, jobs[first : first + _AT_ONCE])


def _decode_some(kind: str, jobs: Sequence[Decoding]) -> None:
    joined = _Joined.of(kind, jobs)
    kernel = native.kernel(kind)
    if kernel is None:
        for job in jobs:
            _decode_in_numpy(kind, job)
        return
    read = _run(kernel, jobs, joined)
    if (joined.states != LEAST_STATE).any() or (read != joined.counts).any():
        raise DamagedError("an encoded stream that does not end where it should")


@dataclass(frozen=True, slots=True)
class _Joined:
    """Arrays of all jobs end to end, checked. Few calls into numpy, as each takes as long as a thousand symbols.

    A copy of the words is also quicker than asking where each stream's are, and whether more may be read behind them.
    """

    columns: I64  # of each job
    counts: I64  # words of each job
    words: U16  # and 128 bytes more
    states: U32  # 64 a job; replaced by those at the end
    ids: U16
    places: npt.NDArray[np.int32]
    scaling: npt.NDArray[np.float32]  # scales of all jobs, then their offsets; empty for int16

    @classmethod
    def of(cls, kind: str, jobs: Sequence[Decoding]) -> _Joined:
        sizes = [len(job.ids) for job in jobs]
        columns = np.array(sizes)
        if (columns % LANES).any() or any(len(job.stream.states) != LANES for job in jobs):
            raise DamagedError("a stream without its 64 lanes")
        if [len(job.places) * BLOCK for job in jobs] != sizes:
            raise ValueError("a place for each 32 columns")
        joined = cls(
            columns,
            np.array([len(job.stream.words) for job in jobs]),
            _join([*(job.stream.words for job in jobs), _BEHIND]),
            _join([job.stream.states for job in jobs], np.uint32),
            _join([job.ids for job in jobs]),
            _join([job.places for job in jobs], np.int32),
            _scaling(jobs, sizes),
        )
        room = np.repeat([job.out.shape[1] - BLOCK for job in jobs], columns // BLOCK)
        if ((joined.places < 0) | (joined.places > room)).any():
            raise ValueError("a place outside of the output")
        above = MOST_CONTEXT if kind == ir_decode.REFINE else 0
        if (joined.ids >= np.repeat([len(job.tables) - above for job in jobs], columns)).any():
            raise DamagedError("a column that names no table")
        return joined


def _join(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike = np.uint16) -> npt.NDArray[Any]:
    """Vectors of one type, end to end."""
    joined = np.concatenate(parts)
    if joined.ndim != 1 or joined.dtype != dtype:
        raise ValueError(f"vectors of {np.dtype(dtype)} are needed, not {joined.ndim}-D {joined.dtype}")
    return joined


def _scaling(jobs: Sequence[Decoding], sizes: list[int]) -> npt.NDArray[np.float32]:
    parts = [part for part in (*(job.scale for job in jobs), *(job.offset for job in jobs)) if part is not None]
    wanted = [] if jobs[0].form == "int16" else sizes * 2
    if [len(part) for part in parts] != wanted:
        raise ValueError("scale and offset have one number a column, and belong to the float forms")
    scaling = _join(parts or [np.empty(0, np.float32)], np.float32)
    if not np.isfinite(scaling).all():
        raise DamagedError("a scale or offset that is not a finite number")
    return scaling


def _run(kernel: native.Kernel, jobs: Sequence[Decoding], joined: _Joined) -> I64:
    """All jobs in one call; how many words each asked for."""
    read = np.zeros(len(jobs), np.int64)
    bases = joined.ids.astype(np.uint32) * np.uint32(SLOTS)
    tables = {id(job.tables): job.tables for job in jobs}
    slots = {key: _address(one.slots) for key, one in tables.items()}
    number = np.arange(len(jobs))
    columns, counts = joined.columns, joined.counts
    before = np.cumsum(columns) - columns
    scale = _address(joined.scaling) + before * 4
    values: dict[str, I64 | list[int]] = {
        "words": _address(joined.words) + (np.cumsum(counts) - counts) * 2,
        "count": counts,
        "states": _address(joined.states) + number * (4 * LANES),
        "bases": _address(bases) + before * 4,
        "slots": [slots[id(job.tables)] for job in jobs],
        "places": _address(joined.places) + before // BLOCK * 4,
        "out": [_address(job.out) for job in jobs],
        "stride": [job.out.strides[0] for job in jobs],
        "rows": [job.rows for job in jobs],
        "groups": columns // LANES,
        "scale": scale,
        "offset": scale + joined.scaling.nbytes // 2,
        "read": _address(read) + number * 8,
    }
    fields = np.array([values[name] for name in ir_decode.FIELDS], np.int64).T
    some = (fields[:, _ROWS] > 0) & (columns > 0)
    fields = np.ascontiguousarray(fields[some])  # a kernel's loops run once at least
    if len(fields):
        kernel(_address(fields), len(fields))
    return read


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _decode_in_numpy(kind: str, job: Decoding) -> None:
    """The same by the reference."""
    wanted = (job.places[:, None] + np.arange(BLOCK)).reshape(-1)
    coarse = job.out[:, wanted].astype(np.int32) if kind == ir_decode.REFINE else None
    contexts = None if coarse is None else np.minimum(np.abs(coarse), MOST_CONTEXT).astype(np.uint8)
    symbols = reference.decode(job.stream, job.rows, job.ids, job.tables, contexts)
    numbers = symbols.astype(np.int32) - ZERO
    if coarse is not None:
        numbers = 3 * coarse + np.where(coarse < 0, -numbers, numbers)
    if job.form == "int16":
        job.out[:, wanted] = numbers.astype(np.int16)
        return
    assert job.scale is not None
    assert job.offset is not None
    with np.errstate(over="ignore"):
        values = numbers.astype(np.float32) * job.scale + job.offset
        job.out[:, wanted] = values.astype(np.float16) if job.form == "float16" else _bfloat16(values)


def _bfloat16(values: npt.NDArray[np.float32]) -> U16:
    """Bits of the nearest bfloat16, ties to even; values are not NaN."""
    bits = values.view(np.uint32)
    return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)


def _encoder_entries(tables: TableSet) -> U32:
    """What an encoder looks up, uint32 `[tables * 256]`: frequency | cumulative << 12, or that there is none."""
    found = _entries.get(tables)
    if found is None:
        frequencies = tables.frequencies.astype(np.uint32)
        cumulative = tables.cumulative.astype(np.uint32) << np.uint32(ir_encode.CUMULATIVE_AT)
        there = np.asarray(frequencies | cumulative, np.uint32)
        found = np.where(frequencies == 0, np.uint32(ir_encode.MISSING), there).reshape(-1)
        _entries[tables] = found
    return found


def _check_symbols(symbols: U8, ids: U16, tables: TableSet, contexts: U8 | None) -> None:
    if symbols.ndim != 2 or symbols.dtype != np.uint8 or not symbols.flags.c_contiguous or symbols.shape[1] % LANES:
        raise ValueError("symbols are uint8 [rows, columns], columns a multiple of 64")
    if contexts is not None and (
        contexts.shape != symbols.shape or contexts.dtype != np.uint8 or not contexts.flags.c_contiguous
    ):
        raise ValueError("contexts are uint8, one a symbol")
    if ids.shape != symbols.shape[1:] or ids.dtype != np.uint16:
        raise ValueError("ids are uint16, one a column")
    most = 0 if contexts is None or not contexts.size else int(contexts.max())
    if len(ids) and int(ids.max()) + most >= len(tables):
        raise ValueError("a column that names no table")


def _check_output(job: Decoding) -> None:
    out = job.out
    if out.ndim != 2 or out.dtype != _HELD[job.form] or len(out) != job.rows or not out.flags.behaved:
        raise ValueError(f"output is {job.form}, [rows, stride], aligned, and can be written")
    if out.size and out.strides[1] != out.itemsize:
        raise ValueError("output rows are contiguous")
