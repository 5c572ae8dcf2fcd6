"""rANS encoder and decoder, and symbols of numbers, in machine code that checks nothing: arrays are checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from kvtool.core.codec.rans.kernels_ir import ENCODE, FINER, SYMBOLS, Decode, Encode, finer_module, symbols_module
from kvtool.core.codec.rans.tables import I16, LANES, LEAST_STATE, MOST_CONTEXT, U8, Columns, Stream
from kvtool.core.errors import DamagedError
from kvtool.core.native.jit import Function, Job, Jobs, Kind, address, kernel, scratch

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


@dataclass(slots=True)  # see Stream
class Decoding:
    stream: Stream
    columns: Columns
    out: I16  # `[rows, stride]`, rows of contiguous numbers
    marked: I16 | None = None  # what the escapes stand for, row by row; None: they stay 127


def decode(*jobs: Decoding) -> None:
    """Decode streams in one call, on one core; other threads run meanwhile.

    A number is its symbol - 128. Columns that refine make finer the coarser numbers q that `out` holds: with r = symbol
    - 128, q becomes 3q + r, or 3q - r where q < 0. A symbol's context is then min(|q|, 2). Numbers beyond int16 wrap.

    Raises DamagedError: no encoder made a stream; `out` may hold anything. Raises ValueError: an array has the wrong
    shape or type, places are outside `out`, or only some jobs' columns refine.
    """
    refines = {job.columns.refines for job in jobs}
    if len(refines) > 1:
        raise ValueError("all columns refine, or none does")
    for job in jobs:
        _check_decoding(job)
    filled = [job for job in jobs if len(job.out) and len(job.columns)]  # a kernel's loops run once at least
    counts = iter(run(kernel(Decode(*refines)), filled) if filled else ())
    for job in jobs:
        if len(job.out) and len(job.columns):
            read, escapes = next(counts)
        else:
            read, escapes = 0 if (job.stream.states == LEAST_STATE).all() else -1, 0
        if read != len(job.stream.words):
            raise DamagedError("an encoded stream that does not end where it should")
        if job.marked is not None and escapes != len(job.marked):
            raise DamagedError("an encoded stream whose escapes are not those that were kept")


def _check_decoding(job: Decoding) -> None:
    out, marked = job.out, job.marked
    if out.ndim != 2 or out.dtype != np.int16 or not out.flags.behaved or (out.size and out.strides[1] != out.itemsize):
        raise ValueError("output is int16, [rows, stride], rows contiguous, aligned, and can be written")
    if job.columns.reach > out.shape[1]:
        raise ValueError("a place outside of the output")
    if marked is not None and (
        job.columns.refines or marked.dtype != np.int16 or marked.ndim != 1 or not marked.flags.c_contiguous
    ):
        raise ValueError("marked values are a vector of int16; columns that refine know no escapes")


def run(function: Function, jobs: Sequence[Decoding]) -> list[tuple[int, int]]:
    """Run checked jobs in one call.

    Returns for each the number of words that the stream asked for, negative where its states do not end right; and the
    number of escapes that were replaced.
    """
    results = np.empty((len(jobs), 2), np.int64)
    at = address(results)
    columns = [job.columns.for_decoder for job in jobs]  # both lists keep what the kernel reads
    marked = [
        np.require(job.marked, requirements="A") if job.marked is not None and len(job.marked) else _NOTHING
        for job in jobs
    ]
    fields = [  # of kernels_ir.DECODE, in their order
        (
            job.stream.address,
            len(job.stream.words),
            job.stream.address + 2 * len(job.stream.words),
            *addresses[:3],
            address(job.out),
            job.out.strides[0],
            len(job.out),
            job.columns.groups,
            address(values),
            len(values) - 1,
            0 if job.marked is None else -1,
            at + 16 * number + 8,
            at + 16 * number,
        )
        for number, (job, addresses, values) in enumerate(zip(jobs, columns, marked, strict=True))
    ]
    # One array of all: each call into numpy takes as long as a thousand symbols.
    memory = np.array(fields, np.int64)
    function(address(memory), len(memory))
    return [(read, escapes) for read, escapes in results.tolist()]


# ---- numbers ⇄ symbols ------------------------------------------------------------------------------------------


def symbols_of(numbers: I16, columns: Sequence[Columns]) -> list[tuple[U8, I16]]:
    """Make symbols of layers' numbers `[layers, rows, stride]`, which have the places of a decoder's output.

    Returns for each layer symbols `[rows, columns]` in this thread's memory, ESCAPE where a column's table lacks the
    number; and the numbers of these escapes, row by row. Raises ValueError: numbers are not int16, too few, or those of
    a row are not side by side.
    """
    _check_numbers(numbers, columns)
    symbols = _cut("symbols", numbers.shape[1], columns)
    marked = scratch("marked", sum(part.size for part in symbols), np.int16)
    starts = [0, *accumulate(part.size for part in symbols)][:-1]
    counts = np.zeros(len(symbols), np.int64)
    addresses = [of.for_encoder for of in columns]
    jobs = _symbol_jobs(SYMBOLS, numbers, columns)
    jobs.set(
        low=[of.low for of in addresses],
        many=[of.many for of in addresses],
        symbols=[address(part) for part in symbols],
        escapes=address(counts) + counts.itemsize * np.arange(len(counts)),
        marked=address(marked) + marked.itemsize * np.array(starts, np.int64),
    )
    _run_symbols(jobs, symbols_module, symbols)
    return [
        (part, marked[start : start + count].copy())
        for part, start, count in zip(symbols, starts, counts.tolist(), strict=True)
    ]


def finer_symbols(numbers: I16, coarse: I16, columns: Sequence[Columns]) -> list[tuple[U8, U8]]:
    """Symbols and contexts `[rows, columns]` that refine coarser numbers to finer ones (see `decode`).

    Numbers are `[layers, rows, stride]`; what is returned is in this thread's memory.
    """
    _check_numbers(numbers, columns)
    _check_numbers(coarse, columns)
    symbols, contexts = (_cut(name, numbers.shape[1], columns) for name in ("symbols", "contexts"))
    jobs = _symbol_jobs(FINER, numbers, columns)
    jobs.set(
        coarse=address(coarse) + coarse.strides[0] * np.arange(len(coarse)),
        symbols=[address(part) for part in symbols],
        contexts=[address(part) for part in contexts],
    )
    _run_symbols(jobs, finer_module, symbols)
    return list(zip(symbols, contexts, strict=True))


def _check_numbers(numbers: I16, columns: Sequence[Columns]) -> None:
    fits = numbers.ndim == 3 and len(numbers) == len(columns)
    if (
        not fits
        or (numbers.size and numbers.strides[2] != numbers.itemsize)
        or numbers.dtype != np.int16
        or max((of.reach for of in columns), default=0) > numbers.shape[2]
    ):
        raise ValueError("numbers are int16 [layers, rows, stride], as wide as the columns reach")


def _cut(name: str, rows: int, columns: Sequence[Columns]) -> list[U8]:
    widths = [of.ids.shape[0] for of in columns]
    ends = list(accumulate(rows * width for width in widths))
    whole = scratch(name, ends[-1] if ends else 0, np.uint8)
    return [whole[end - rows * width : end].reshape(rows, width) for end, width in zip(ends, widths, strict=True)]


def _symbol_jobs(job: Job, numbers: I16, columns: Sequence[Columns]) -> Jobs:
    jobs = Jobs(job, len(columns))
    jobs.set(
        numbers=address(numbers) + numbers.strides[0] * np.arange(len(columns)),
        stride=numbers.strides[1],
        places=[address(of.places) for of in columns],
        rows=numbers.shape[1],
        blocks=[len(of.places) for of in columns],
    )
    return jobs


def _run_symbols(jobs: Jobs, kind: Kind, symbols: Sequence[U8]) -> None:
    jobs.keep(np.array([part.size > 0 for part in symbols], np.bool_))  # a kernel's loops run once at least
    jobs.run(kernel(kind))
