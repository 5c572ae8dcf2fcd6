"""Decode streams, as fast as this machine can; what the bytes are: reference.py.

Everything is checked here, before a kernel that checks nothing sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.entropy import decode_ir, native, reference
from kvtool.core.codec.entropy.columns import Columns
from kvtool.core.codec.entropy.reference import LANES, MOST_CONTEXT, U16, Stream
from kvtool.core.codec.entropy.tables import ESCAPE, ZERO
from kvtool.core.errors import DamagedError
from kvtool.core.native.jit import Function
from kvtool.core.native.job import address

Form = Literal["int16", "bfloat16", "float16"]

HELD: dict[str, np.dtype[Any]] = {  # what holds a form's numbers
    "int16": np.dtype(np.int16),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
}
_BEHIND = np.zeros(LANES, np.uint16)  # a kernel may read this much behind the words
_NO_SCALE = (0, 0)
_NOTHING = np.zeros(1, np.uint16)


@dataclass(frozen=True, eq=False)
class Scaling:
    """What a float form is multiplied by, and what is added: float32 `[columns]` each, finite; checked once.

    A value is number * scale + offset, where the product, the sum and the result are each rounded to nearest, ties to
    even.

    Raises
    ------
    DamagedError : a number that is not finite.
    ValueError : vectors of the wrong type or shape.
    """

    scale: npt.NDArray[np.float32]
    offset: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        for part in (self.scale, self.offset):
            if (
                part.dtype != np.float32
                or part.ndim != 1
                or not part.flags.c_contiguous
                or len(part) != len(self.scale)
            ):
                raise ValueError("scale and offset are contiguous float32, one number a column")
            if not np.isfinite(part).all():
                raise DamagedError("a scale or offset that is not a finite number")

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """The addresses of scale and of offset."""
        return address(self.scale), address(self.offset)


@dataclass(frozen=True, slots=True)
class Decoding:
    """Streams with the same columns, to decode into rows of one array.

    Parameters
    ----------
    streams : their words and states may be views of a read-only buffer; see `Stream.address`.
    starts, rows : first row in `out` of each stream, and how many rows it has; they do not overlap.
    out : `[rows, stride]`, rows of contiguous numbers; int16, or uint16 that holds bfloat16 bits, or float16.
    form : what `out` holds.
    scaling : of the float forms only; without it a value is the number, which both of them hold exactly.
    marked : what the escapes stand for, stream after stream, each row by row, as `out` holds it; not with scaling.
        None: they stay the number 127.
    marks : how many of these each stream has.
    """

    streams: Sequence[Stream]
    columns: Columns
    starts: Sequence[int]
    rows: Sequence[int]
    out: npt.NDArray[Any]
    form: Form = "int16"
    scaling: Scaling | None = None
    marked: npt.NDArray[Any] | None = None
    marks: Sequence[int] = ()

    @property
    def kind(self) -> str:
        """Name of the kernel that decodes them."""
        return self.form if self.form == "int16" or self.scaling is not None else decode_ir.whole(self.form)


def decode(job: Decoding) -> None:
    """Decode streams, one core; other threads run meanwhile. A number is its symbol - 128.

    Raises
    ------
    DamagedError : a stream that no encoder made; `out` may hold anything.
    ValueError : arrays of the wrong shape or type, or places outside `out`.
    UsageError : see native.chosen.
    """
    decode_all([job])


def decode_all(jobs: Sequence[Decoding]) -> None:
    """Decode the streams of several jobs of one kind in one call; raises as `decode` does."""
    if len({job.kind for job in jobs}) > 1:
        raise ValueError("jobs of one kind are decoded together")
    if jobs:
        _decode(jobs[0].kind, jobs)


def refine(job: Decoding) -> None:
    """Refine coarser numbers q, which `out` (int16) holds at the places: q becomes 3q + r, or 3q - r where q < 0.

    The context of a symbol is min(|q|, 2); r is symbol - 128. What does not fit int16 wraps.

    Raises
    ------
    As decode; ValueError also for columns that do not refine.
    """
    if job.form != "int16" or not job.columns.refines or job.marked is not None:
        raise ValueError("only int16 can be refined, by columns that refine and know no escapes")
    _decode(decode_ir.REFINE, [job])


def _decode(kind: str, jobs: Sequence[Decoding]) -> None:
    for job in jobs:
        _check(job)
    kernel = native.kernel(kind)
    if kernel is None:
        for job in jobs:
            _decode_in_numpy(kind, job)
        return
    work = [(job, _with_rows(job)) for job in jobs]
    if not any(some for _, some in work):
        return
    read, escapes = run(kernel, work)
    first = 0
    for job, some in work:
        end = first + len(some)
        if read[first:end] != [len(job.streams[number].words) for number in some]:
            raise DamagedError("an encoded stream that does not end where it should")
        if job.marked is not None:
            for number, count in zip(some, escapes[first:end], strict=True):
                _check_escapes(job, number, count)
        first = end


def _with_rows(job: Decoding) -> list[int]:
    """The streams that a kernel is to run: its loops run once at least. The others are checked here."""
    some = [number for number, rows in enumerate(job.rows) if rows] if len(job.columns) else []
    if len(some) < len(job.streams):
        for number in set(range(len(job.streams))).difference(some):
            stream = job.streams[number]
            reference.check_end(stream.states, 0, len(stream.words))
            _check_escapes(job, number, 0)
    return some


def _check_escapes(job: Decoding, number: int, count: int) -> None:
    if job.marked is not None and count != job.marks[number]:
        raise DamagedError("an encoded stream whose escapes are not those that were kept")


def run(kernel: Function, work: Sequence[tuple[Decoding, Sequence[int]]]) -> tuple[list[int], list[int]]:
    """Run some streams of checked jobs, in one call.

    Returns
    -------
    Of each stream, one job after another, how many words it asked for, negative where its states do not end right; and
    how many escapes were replaced.
    """
    results = np.empty((2, sum(len(some) for _, some in work)), np.int64)
    kept: list[npt.NDArray[Any]] = []
    rows: list[tuple[int, ...]] = []
    for job, some in work:
        rows += _fields(job, some, address(results) + results.itemsize * len(rows), results.strides[0], kept)
    # One array of all: each call into numpy takes as long as a thousand symbols.
    fields = np.array(rows, np.int64)
    kernel(address(fields), len(fields))
    read, escapes = results.tolist()
    return read, escapes


def _fields(
    job: Decoding, some: Sequence[int], at: int, further: int, kept: list[npt.NDArray[Any]]
) -> Iterator[tuple[int, ...]]:
    """For each stream the fields of decode_ir.DECODE, in their order.

    Parameters
    ----------
    at, further : where the first stream's count of escapes goes, and how many bytes behind it that of its words.
    kept : what must outlive the call.
    """
    out, columns = job.out, job.columns
    first, stride, groups = address(out), out.strides[0], columns.groups
    shared = columns.first_slots, columns.tables.slots, columns.places
    kept += shared
    bases, slots, places = map(address, shared)
    scale, offset = _NO_SCALE if job.scaling is None else job.scaling.addresses
    marks, replace = _marks(job), 0 if job.marked is None else -1
    for place, number in enumerate(some):
        stream = job.streams[number]
        words, states = _addresses(stream, kept)
        yield (
            words,
            len(stream.words),
            states,
            bases,
            slots,
            places,
            first + stride * job.starts[number],
            stride,
            job.rows[number],
            groups,
            scale,
            offset,
            *marks[number],
            replace,
            at + further + 8 * place,
            at + 8 * place,
        )


def _marks(job: Decoding) -> list[tuple[int, int]]:
    """For each stream the address of its first marked value and the number of its last; one may always be read."""
    if job.marked is None or not len(job.marked):
        return [(address(_NOTHING), 0)] * len(job.streams)
    first, size, last = address(job.marked), job.marked.itemsize, len(job.marked) - 1
    befores = (end - count for end, count in zip(accumulate(job.marks), job.marks, strict=True))
    return [
        (first + size * min(before, last), max(0, count - 1)) for before, count in zip(befores, job.marks, strict=True)
    ]


def _addresses(stream: Stream, kept: list[npt.NDArray[Any]]) -> tuple[int, int]:
    """The address of the words, behind which a kernel may read (the states, or else zeros), and that of the states."""
    if stream.address:
        return stream.address, stream.address + 2 * len(stream.words)
    kept.append(np.concatenate([stream.words, _BEHIND]))
    return address(kept[-1]), address(stream.states)


# ---- checks ------------------------------------------------------------------------------------------------------


def _check(job: Decoding) -> None:
    """Everything that a kernel relies upon to stay inside its arrays."""
    for stream in job.streams:
        if not stream.address:
            _check_stream(stream)
    out, held, count = job.out, HELD.get(job.form), len(job.streams)
    if out.ndim != 2 or out.dtype != held or not out.flags.behaved or (out.size and out.strides[1] != out.itemsize):
        raise ValueError(f"output is {job.form}, [rows, stride], rows contiguous, aligned, and can be written")
    if job.columns.reach > out.shape[1]:
        raise ValueError("a place outside of the output")
    if len(job.starts) != count or len(job.rows) != count or min((*job.starts, *job.rows), default=0) < 0:
        raise ValueError("each stream has its rows in the output")
    if any(start + rows > len(out) for start, rows in zip(job.starts, job.rows, strict=True)):
        raise ValueError("rows outside of the output")
    if job.marked is not None and not _are_marks(job, job.marked):
        raise ValueError("marked values are a vector of what the output holds, and are not scaled")
    if job.scaling is not None and (job.form == "int16" or len(job.scaling.scale) != len(job.columns)):
        raise ValueError("scale and offset have one number a column, and belong to the float forms")


def _check_stream(stream: Stream) -> None:
    words, states = stream.words, stream.states
    if words.dtype != np.uint16 or words.ndim != 1 or states.dtype != np.uint32 or states.ndim != 1:
        raise ValueError("a stream is words of uint16 and states of uint32")
    if len(states) != LANES:
        raise DamagedError("a stream without its 64 lanes")
    if not (words.flags.c_contiguous and states.flags.c_contiguous):
        raise ValueError("a stream's words and states are contiguous")


def _are_marks(job: Decoding, marked: npt.NDArray[Any]) -> bool:
    fits = marked.dtype == HELD[job.form] and marked.ndim == 1 and marked.flags.c_contiguous
    counted = len(job.marks) == len(job.streams) and min(job.marks, default=0) >= 0 and sum(job.marks) == len(marked)
    return job.scaling is None and fits and counted


# ---- without machine code ----------------------------------------------------------------------------------------


def _decode_in_numpy(kind: str, job: Decoding) -> None:
    """Decode by the reference what no kernel was made for."""
    wanted = job.columns.numbers
    ends = list(accumulate(job.marks))
    for number, (stream, start, rows) in enumerate(zip(job.streams, job.starts, job.rows, strict=True)):
        out = job.out[start : start + rows]
        coarse = out[:, wanted].astype(np.int32) if kind == decode_ir.REFINE else None
        contexts = None if coarse is None else np.minimum(np.abs(coarse), MOST_CONTEXT).astype(np.uint8)
        symbols = reference.decode(stream, rows, job.columns.ids, job.columns.tables, contexts)
        numbers = symbols.astype(np.int32) - ZERO
        if coarse is not None:
            numbers = 3 * coarse + np.where(coarse < 0, -numbers, numbers)
        values = _in_form(job, numbers)
        if job.marked is not None:
            escapes = symbols == ESCAPE
            _check_escapes(job, number, int(escapes.sum()))
            values[escapes] = job.marked[ends[number] - job.marks[number] : ends[number]]
        out[:, wanted] = values


def _in_form(job: Decoding, numbers: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
    if job.form == "int16":
        return numbers.astype(np.int16)
    values = numbers.astype(np.float32)
    with np.errstate(over="ignore"):
        if job.scaling is not None:
            values = values * job.scaling.scale + job.scaling.offset
        return values.astype(np.float16) if job.form == "float16" else _bfloat16(values)


def _bfloat16(values: npt.NDArray[np.float32]) -> U16:
    """Bits of the nearest bfloat16, ties to even; values are not NaN."""
    bits = values.view(np.uint32)
    return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)
