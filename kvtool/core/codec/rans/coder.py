"""rANS encoder and decoder in machine code that checks nothing: all arrays and lengths are checked here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.rans import kernels_ir
from kvtool.core.codec.rans.kernels_ir import REFINE, Decode, Encode
from kvtool.core.codec.rans.tables import LANES, LEAST_STATE, MOST_CONTEXT, U8, Columns, Stream
from kvtool.core.errors import DamagedError
from kvtool.core.native.jit import Function, kernel
from kvtool.core.native.job import Jobs, address, scratch

Form = Literal["int16", "bfloat16"]
HELD: dict[str, np.dtype[Any]] = {  # what holds a form's numbers
    "int16": np.dtype(np.int16),
    "bfloat16": np.dtype(np.uint16),
}
_SLACK = 16  # words an encoder may write after the last: those of a register
_NOTHING = np.zeros(1, np.uint16)


def compile_ahead(dtype: str) -> None:
    for form in kernels_ir.FORMS:
        if form in (dtype, "int16"):  # as it is, and what a finer level refines, or products in float32 take
            kernel(Decode(form))


# ---- encoding ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encoding:
    symbols: U8  # `[rows, columns]`
    columns: Columns
    contexts: U8 | None = None  # `[rows, columns]`, at most 2, added to the column's table id; where the columns refine


def encode(*encodings: Encoding) -> list[Stream]:
    """Encode in one call, each as a stream of its own in one piece of memory.

    Raises ValueError: a table gives a symbol no frequency, an array has the wrong shape, or only some have contexts.
    """
    for one in encodings:
        _check_encoding(one.symbols, one.columns, one.contexts)
    contexts = bool(encodings) and encodings[0].contexts is not None
    if any((one.contexts is not None) != contexts for one in encodings):
        raise ValueError("all have contexts, or none has")
    made = iter(_encode(kernel(Encode(contexts)), [one for one in encodings if one.symbols.size]))
    empty = np.empty(0, np.uint16), np.full(LANES, LEAST_STATE, np.uint32)
    return [next(made) if one.symbols.size else Stream.of(*empty) for one in encodings]


def _check_encoding(symbols: U8, columns: Columns, contexts: U8 | None) -> None:
    wanted = (len(symbols), columns.ids.shape[0])
    if symbols.shape != wanted or symbols.dtype != np.uint8 or not symbols.flags.c_contiguous:
        raise ValueError("symbols are uint8 [rows, columns]")
    if contexts is None:
        return
    if contexts.shape != wanted or contexts.dtype != np.uint8 or not contexts.flags.c_contiguous:
        raise ValueError("contexts are uint8, one a symbol")
    if not columns.refines or (contexts.size and int(contexts.max()) > MOST_CONTEXT):
        raise ValueError("contexts up to 2, of columns that refine")


def _encode(function: Function, encodings: Sequence[Encoding]) -> list[Stream]:
    if not encodings:
        return []
    sizes = [one.symbols.size for one in encodings]  # symbols and contexts are bytes
    ends = list(accumulate(size + _SLACK for size in sizes))
    words = scratch("words", ends[-1], np.uint16)
    starts = [end - size - _SLACK for end, size in zip(ends, sizes, strict=True)]
    states = np.full((len(encodings), LANES), LEAST_STATE, np.uint32)
    counts = np.zeros((len(encodings), 2), np.int64)
    held = [one.columns.for_encoder for one in encodings]
    entries = [one.columns.tables.encoder_entries for one in encodings]
    at = address(counts) + np.arange(len(encodings)) * counts.strides[0]
    jobs = Jobs(kernels_ir.ENCODE, len(encodings))
    jobs.set(
        symbols=[address(one.symbols) + size for one, size in zip(encodings, sizes, strict=True)],
        contexts=[
            0 if one.contexts is None else address(one.contexts) + size
            for one, size in zip(encodings, sizes, strict=True)
        ],
        bases=[of.first_entries for of in held],
        entries=[address(own) for own in entries],
        states=address(states) + np.arange(len(encodings)) * states.strides[0],
        words=address(words) + np.array(starts) * words.itemsize,
        rows=[len(one.symbols) for one in encodings],
        groups=[one.columns.groups for one in encodings],
        written=at,
        missing=at + counts.itemsize,
    )
    jobs.run(function)
    if (counts[:, 1] & (1 << 31)).any():
        raise ValueError("a symbol that its table does not have")
    return [
        Stream.of(words[start : start + count][::-1], own)
        for start, count, own in zip(starts, counts[:, 0].tolist(), states[:, ::-1].copy(), strict=True)
    ]


# ---- decoding ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decoding:
    """Streams with the same columns, to decode into rows of one array."""

    streams: Sequence[Stream]
    columns: Columns
    starts: Sequence[int]  # first row in `out` of each stream
    rows: Sequence[int]  # of each stream; they do not overlap
    out: npt.NDArray[Any]  # `[rows, stride]`, rows of contiguous numbers; int16, or uint16 that holds bfloat16 bits
    form: Form = "int16"  # of `out`
    marked: npt.NDArray[Any] | None = None  # what the escapes stand for, stream after stream; None: they stay 127
    marks: Sequence[int] = ()  # number of these of each stream

    @property
    def kind(self) -> str:
        return REFINE if self.columns.refines else self.form


def decode(*jobs: Decoding) -> None:
    """Decode the streams of jobs of one kind in one call, on one core; other threads run meanwhile.

    A number is its symbol - 128. Columns that refine make finer the coarser numbers q that `out` (int16) holds: with r
    = symbol - 128, q becomes 3q + r, or 3q - r where q < 0. A symbol's context is then min(|q|, 2). Numbers beyond
    int16 wrap.

    Raises DamagedError: no encoder made a stream; `out` may hold anything. Raises ValueError: arrays have the wrong
    shape or type, places are outside `out`, or kinds differ.
    """
    kinds = {job.kind for job in jobs}
    if len(kinds) > 1:
        raise ValueError("jobs of one kind are decoded together")
    for job in jobs:
        _check_decoding(job)
    work = [(job, _with_rows(job)) for job in jobs]
    if not any(some for _, some in work):
        return
    read, escapes = run(kernel(Decode(*kinds)), work)
    first = 0
    for job, some in work:
        end = first + len(some)
        if read[first:end] != [len(job.streams[number].words) for number in some]:
            raise DamagedError("an encoded stream that does not end where it should")
        if job.marked is not None:
            for number, count in zip(some, escapes[first:end], strict=True):
                _check_escapes(job, number, count)
        first = end


def _check_decoding(job: Decoding) -> None:
    out, held, count = job.out, HELD.get(job.form), len(job.streams)
    if out.ndim != 2 or out.dtype != held or not out.flags.behaved or (out.size and out.strides[1] != out.itemsize):
        raise ValueError(f"output is {job.form}, [rows, stride], rows contiguous, aligned, and can be written")
    if job.columns.reach > out.shape[1]:
        raise ValueError("a place outside of the output")
    if len(job.starts) != count or len(job.rows) != count or min((*job.starts, *job.rows), default=0) < 0:
        raise ValueError("each stream has its rows in the output")
    if any(start + rows > len(out) for start, rows in zip(job.starts, job.rows, strict=True)):
        raise ValueError("rows outside of the output")
    if job.columns.refines and (job.form != "int16" or job.marked is not None):
        raise ValueError("only int16 can be refined, and knows no escapes")
    if job.marked is not None and not _are_marks(job, job.marked):
        raise ValueError("marked values are a vector of what the output holds")


def _are_marks(job: Decoding, marked: npt.NDArray[Any]) -> bool:
    fits = marked.dtype == HELD[job.form] and marked.ndim == 1 and marked.flags.c_contiguous
    return (
        fits and len(job.marks) == len(job.streams) and min(job.marks, default=0) >= 0 and sum(job.marks) == len(marked)
    )


def _with_rows(job: Decoding) -> list[int]:
    """The streams that a kernel is to run, as its loops run once at least. The others are checked here."""
    some = [number for number, rows in enumerate(job.rows) if rows] if len(job.columns) else []
    if len(some) < len(job.streams):
        for number in set(range(len(job.streams))).difference(some):
            stream = job.streams[number]
            if len(stream.words) or (stream.states != LEAST_STATE).any():
                raise DamagedError("an encoded stream that does not end where it should")
            _check_escapes(job, number, 0)
    return some


def _check_escapes(job: Decoding, number: int, count: int) -> None:
    if job.marked is not None and count != job.marks[number]:
        raise DamagedError("an encoded stream whose escapes are not those that were kept")


def run(function: Function, work: Sequence[tuple[Decoding, Sequence[int]]]) -> tuple[list[int], list[int]]:
    """Run some streams of checked jobs, in one call.

    Returns for each stream, one job after another, the number of words it asked for, negative where its states do not
    end right; and the number of escapes that were replaced.
    """
    results = np.empty((2, sum(len(some) for _, some in work)), np.int64)
    kept: list[npt.NDArray[Any]] = []
    rows: list[tuple[int, ...]] = []
    for job, some in work:
        rows += _fields(job, some, address(results) + results.itemsize * len(rows), results.strides[0], kept)
    # One array of all: each call into numpy takes as long as a thousand symbols.
    fields = np.array(rows, np.int64)
    function(address(fields), len(fields))
    read, escapes = results.tolist()
    return read, escapes


def _fields(
    job: Decoding, some: Sequence[int], at: int, further: int, kept: list[npt.NDArray[Any]]
) -> Iterator[tuple[int, ...]]:
    """Yield for each stream the fields of kernels_ir.DECODE, in their order.

    `at` is the address of the first stream's count of words, `further` the bytes from it to the count of its escapes.
    `kept` collects what must outlive the call.
    """
    out, columns = job.out, job.columns
    first, stride, groups = address(out), out.strides[0], columns.groups
    shared = columns.first_slots, columns.tables.slots, columns.places
    kept += shared
    bases, slots, places = map(address, shared)
    marks, replace = _marks(job), 0 if job.marked is None else -1
    for place, number in enumerate(some):
        stream = job.streams[number]
        yield (
            stream.address,
            len(stream.words),
            stream.address + 2 * len(stream.words),
            bases,
            slots,
            places,
            first + stride * job.starts[number],
            stride,
            job.rows[number],
            groups,
            *marks[number],
            replace,
            at + further + 8 * place,
            at + 8 * place,
        )


def _marks(job: Decoding) -> list[tuple[int, int]]:
    """Return for each stream the address of its first marked value and the number of its last, which may be read."""
    if job.marked is None or not len(job.marked):
        return [(address(_NOTHING), 0)] * len(job.streams)
    first, size, last = address(job.marked), job.marked.itemsize, len(job.marked) - 1
    befores = (end - count for end, count in zip(accumulate(job.marks), job.marks, strict=True))
    return [
        (first + size * min(before, last), max(0, count - 1)) for before, count in zip(befores, job.marks, strict=True)
    ]
