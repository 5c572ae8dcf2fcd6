"""rANS encoder and decoder in machine code that checks nothing: all arrays and lengths are checked here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.rans.kernels_ir import ENCODE, Decode, Encode
from kvtool.core.codec.rans.tables import I16, LANES, LEAST_STATE, MOST_CONTEXT, U8, Columns, Stream
from kvtool.core.errors import DamagedError
from kvtool.core.native.jit import Function, kernel
from kvtool.core.native.job import Jobs, address, scratch

_SLACK = 16  # words an encoder may write after the last: those of a register
_NOTHING = np.zeros(1, np.int16)


def compile_ahead() -> None:
    kernel(Decode())


@dataclass(frozen=True, slots=True)
class Encoding:
    symbols: U8  # `[rows, columns]`
    columns: Columns
    contexts: U8 | None = None  # `[rows, columns]`, at most 2, added to the column's table id; where the columns refine


def encode(*encodings: Encoding) -> list[Stream]:
    """Encode in one call, each as a stream of its own in one piece of memory.

    Raises ValueError: a table gives a symbol no frequency, an array has the wrong shape, or only some have contexts.
    """
    for encoding in encodings:
        _check_encoding(encoding.symbols, encoding.columns, encoding.contexts)
    contexts = {encoding.contexts is not None for encoding in encodings}
    if len(contexts) > 1:
        raise ValueError("all have contexts, or none has")
    filled = [encoding for encoding in encodings if encoding.symbols.size]
    streams = iter(_encode(kernel(Encode(*contexts)), filled) if filled else ())
    empty = np.empty(0, np.uint16), np.full(LANES, LEAST_STATE, np.uint32)
    return [next(streams) if encoding.symbols.size else Stream.of(*empty) for encoding in encodings]


def _check_encoding(symbols: U8, columns: Columns, contexts: U8 | None) -> None:
    shape = (len(symbols), columns.ids.shape[0])
    if any(
        part.shape != shape or part.dtype != np.uint8 or not part.flags.c_contiguous
        for part in (symbols, symbols if contexts is None else contexts)
    ):
        raise ValueError("symbols and contexts are uint8 [rows, columns]")
    if contexts is not None and not (columns.refines and contexts.max(initial=0) <= MOST_CONTEXT):
        raise ValueError("contexts up to 2, of columns that refine")


def _encode(function: Function, encodings: Sequence[Encoding]) -> list[Stream]:
    sizes = [encoding.symbols.size for encoding in encodings]  # symbols and contexts are bytes
    starts = [0, *accumulate(size + _SLACK for size in sizes)]
    words = scratch("words", starts.pop(), np.uint16)
    states = np.full((len(encodings), LANES), LEAST_STATE, np.uint32)
    counts = np.zeros((len(encodings), 2), np.int64)
    at = address(counts) + np.arange(len(encodings)) * counts.strides[0]
    columns = [encoding.columns.for_encoder for encoding in encodings]  # both lists keep what the kernel reads
    entries = [encoding.columns.tables.encoder_entries for encoding in encodings]
    ends = [
        (address(one.symbols) + size, 0 if one.contexts is None else address(one.contexts) + size)
        for one, size in zip(encodings, sizes, strict=True)
    ]
    jobs = Jobs(ENCODE, len(encodings))
    jobs.set(
        symbols=[symbols for symbols, _ in ends],
        contexts=[contexts for _, contexts in ends],
        bases=[addresses.first_entries for addresses in columns],
        entries=[address(table) for table in entries],
        states=address(states) + np.arange(len(encodings)) * states.strides[0],
        words=address(words) + np.array(starts) * words.itemsize,
        rows=[len(encoding.symbols) for encoding in encodings],
        groups=[encoding.columns.groups for encoding in encodings],
        written=at,
        missing=at + counts.itemsize,
    )
    jobs.run(function)
    if (counts[:, 1] & (1 << 31)).any():
        raise ValueError("a symbol that its table does not have")
    return [
        Stream.of(words[start : start + count][::-1], final)
        for start, count, final in zip(starts, counts[:, 0].tolist(), states[:, ::-1].copy(), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Decoding:
    """Streams with the same columns, to decode into rows of one array."""

    streams: Sequence[Stream]
    columns: Columns
    starts: Sequence[int]  # first row in `out` of each stream
    rows: Sequence[int]  # of each stream; they do not overlap
    out: I16  # `[rows, stride]`, rows of contiguous numbers
    marked: I16 | None = None  # what the escapes stand for, stream after stream; None: they stay 127
    marks: Sequence[int] = ()  # number of these of each stream


def decode(*jobs: Decoding) -> None:
    """Decode the streams of jobs in one call, on one core; other threads run meanwhile.

    A number is its symbol - 128. Columns that refine make finer the coarser numbers q that `out` holds: with r = symbol
    - 128, q becomes 3q + r, or 3q - r where q < 0. A symbol's context is then min(|q|, 2). Numbers beyond int16 wrap.

    Raises DamagedError: no encoder made a stream; `out` may hold anything. Raises ValueError: arrays have the wrong
    shape or type, places are outside `out`, or only some jobs' columns refine.
    """
    refines = {job.columns.refines for job in jobs}
    if len(refines) > 1:
        raise ValueError("all columns refine, or none does")
    for job in jobs:
        _check_decoding(job)
    work = [(job, _with_rows(job)) for job in jobs]
    if not any(numbers for _, numbers in work):
        return
    read, escapes = run(kernel(Decode(*refines)), work)
    first = 0
    for job, numbers in work:
        end = first + len(numbers)
        if read[first:end] != [len(job.streams[number].words) for number in numbers]:
            raise DamagedError("an encoded stream that does not end where it should")
        for number, count in zip(numbers, escapes[first:end], strict=True):
            _check_escapes(job, number, count)
        first = end


def _check_decoding(job: Decoding) -> None:
    out, marked, count = job.out, job.marked, len(job.streams)
    if out.ndim != 2 or out.dtype != np.int16 or not out.flags.behaved or (out.size and out.strides[1] != out.itemsize):
        raise ValueError("output is int16, [rows, stride], rows contiguous, aligned, and can be written")
    if job.columns.reach > out.shape[1]:
        raise ValueError("a place outside of the output")
    if len(job.starts) != count or len(job.rows) != count or min((*job.starts, *job.rows), default=0) < 0:
        raise ValueError("each stream has its rows in the output")
    if any(start + rows > len(out) for start, rows in zip(job.starts, job.rows, strict=True)):
        raise ValueError("rows outside of the output")
    if marked is None:
        return
    if job.columns.refines or marked.dtype != np.int16 or marked.ndim != 1 or not marked.flags.c_contiguous:
        raise ValueError("marked values are a vector of int16; columns that refine know no escapes")
    if len(job.marks) != count or min(job.marks, default=0) < 0 or sum(job.marks) != len(marked):
        raise ValueError("each stream has its marked values")


def _with_rows(job: Decoding) -> list[int]:
    """The streams that a kernel is to run, as its loops run once at least. The others are checked here."""
    numbers = [number for number, rows in enumerate(job.rows) if rows] if len(job.columns) else []
    for number in set(range(len(job.streams))).difference(numbers) if len(numbers) < len(job.streams) else ():
        stream = job.streams[number]
        if len(stream.words) or (stream.states != LEAST_STATE).any():
            raise DamagedError("an encoded stream that does not end where it should")
        _check_escapes(job, number, 0)
    return numbers


def _check_escapes(job: Decoding, number: int, count: int) -> None:
    if job.marked is not None and count != job.marks[number]:
        raise DamagedError("an encoded stream whose escapes are not those that were kept")


def run(function: Function, work: Sequence[tuple[Decoding, Sequence[int]]]) -> tuple[list[int], list[int]]:
    """Run some streams of checked jobs, in one call.

    Returns for each stream, one job after another, the number of words it asked for, negative where its states do not
    end right; and the number of escapes that were replaced.
    """
    results = np.empty((2, sum(len(numbers) for _, numbers in work)), np.int64)
    rows: list[tuple[int, ...]] = []
    arrays: list[npt.NDArray[Any]] = []
    for job, numbers in work:
        rows += _fields(job, numbers, address(results) + results.itemsize * len(rows), results.strides[0], arrays)
    # One array of all: each call into numpy takes as long as a thousand symbols.
    fields = np.array(rows, np.int64)
    function(address(fields), len(fields))
    read, escapes = results.tolist()
    return read, escapes


def _fields(
    job: Decoding, numbers: Sequence[int], at: int, further: int, arrays: list[npt.NDArray[Any]]
) -> Iterator[tuple[int, ...]]:
    """Yield for each stream the fields of kernels_ir.DECODE, in their order.

    `at` is the address of the first stream's count of words, `further` the bytes from it to the count of its escapes.
    `arrays` collects what must outlive the call.
    """
    out, columns = job.out, job.columns
    first, stride, groups = address(out), out.strides[0], columns.groups
    shared = columns.first_slots, columns.tables.slots, columns.places
    arrays += shared
    bases, slots, places = map(address, shared)
    marks, replace = _marks(job), 0 if job.marked is None else -1
    for place, number in enumerate(numbers):
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
