"""Decode streams, as fast as this machine can; what the bytes are: reference.py.

Everything is checked here, before a kernel that checks nothing sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.entropy import ir_decode, native, reference
from kvtool.core.codec.entropy.columns import Columns, address
from kvtool.core.codec.entropy.ir_output import BLOCK, MOST_CONTEXT
from kvtool.core.codec.entropy.reference import LANES, U16, Stream
from kvtool.core.codec.entropy.tables import ESCAPE, ZERO
from kvtool.core.errors import DamagedError

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
        """Of scale and of offset."""
        return address(self.scale), address(self.offset)


@dataclass(slots=True)  # see Stream
class Decoding:
    """One stream to decode into a place of a larger array.

    Parameters
    ----------
    stream : its words and states may be views of a read-only buffer; they are read where they are if the states follow
        the words.
    rows : of the stream and of `out`.
    out : `[rows, stride]`, rows of contiguous numbers; int16, or uint16 that holds bfloat16 bits, or float16.
    form : what `out` holds.
    scaling : of the float forms only; without it a value is the number, which both of them hold exactly.
    marked : what the escapes stand for, one after another in the stream's order, as `out` holds it; not with scaling.
        None: they stay the number 127.
    """

    stream: Stream
    columns: Columns
    rows: int
    out: npt.NDArray[Any]
    form: Form = "int16"
    scaling: Scaling | None = None
    marked: npt.NDArray[Any] | None = None

    @property
    def kind(self) -> str:
        """Name of the kernel that decodes it."""
        return self.form if self.form == "int16" or self.scaling is not None else ir_decode.whole(self.form)


def decode_batch(jobs: Sequence[Decoding]) -> None:
    """Decode streams, one core; other threads run meanwhile. A number is its symbol - 128.

    Raises
    ------
    DamagedError : a stream that no encoder made; every `out` may hold anything.
    ValueError : arrays of the wrong shape or type, or places outside `out`.
    UsageError : see native.chosen.
    """
    kinds = [job.kind for job in jobs]
    for kind in dict.fromkeys(kinds):
        _decode(kind, [job for job, its in zip(jobs, kinds, strict=True) if its == kind])


def refine_batch(jobs: Sequence[Decoding]) -> None:
    """Refine coarser numbers q, which `out` (int16) holds at the places: q becomes 3q + r, or 3q - r where q < 0.

    The context of a symbol is min(|q|, 2); r is symbol - 128. What does not fit int16 wraps.

    Raises
    ------
    As decode_batch; ValueError also for columns that do not refine.
    """
    if any(job.form != "int16" or not job.columns.refines or job.marked is not None for job in jobs):
        raise ValueError("only int16 can be refined, by columns that refine and know no escapes")
    _decode(ir_decode.REFINE, jobs)


def _decode(kind: str, jobs: Sequence[Decoding]) -> None:
    if not jobs:
        return
    for job in jobs:
        _check(job)
    kernel = native.kernel(kind)
    if kernel is None:
        for job in jobs:
            _decode_in_numpy(kind, job)
        return
    some = [job for job in jobs if job.rows and len(job.columns)]  # a kernel's loops run once at least
    if len(some) < len(jobs):
        for job in jobs:
            if not (job.rows and len(job.columns)):
                reference.check_end(job.stream.states, 0, len(job.stream.words))
                _check_escapes(job, 0)
    if not some:
        return
    read, escapes = run(kernel, some)
    if read != [len(job.stream.words) for job in some]:
        raise DamagedError("an encoded stream that does not end where it should")
    for job, count in zip(some, escapes, strict=True):
        _check_escapes(job, count)


def _check_escapes(job: Decoding, count: int) -> None:
    if job.marked is not None and count != len(job.marked):
        raise DamagedError("an encoded stream whose escapes are not those that were kept")


def run(kernel: native.Kernel, jobs: Sequence[Decoding]) -> tuple[list[int], list[int]]:
    """Run checked jobs in one call.

    Returns
    -------
    How many words each asked for, negative where its states do not end right; and how many escapes were replaced.
    """
    results = np.empty((2, len(jobs)), np.int64)
    at, further = address(results), results.strides[0]
    kept: list[npt.NDArray[Any]] = []
    rows = [(*_fields(job, kept), at + further + 8 * number, at + 8 * number) for number, job in enumerate(jobs)]
    fields = np.array(rows, np.int64)
    kernel(address(fields), len(jobs))
    read, escapes = results.tolist()
    return read, escapes


def _fields(job: Decoding, kept: list[npt.NDArray[Any]]) -> tuple[int, ...]:
    """A job's fields but the last two, in the order of ir_decode.FIELDS; `kept`: what must live until it is done."""
    bases, slots, places = job.columns.decoding
    scale, offset = _NO_SCALE if job.scaling is None else job.scaling.addresses
    out, marked = job.out, _NOTHING if job.marked is None or not len(job.marked) else job.marked
    count = len(job.stream.words)
    words, states = _addresses(job.stream, kept)
    return (
        words,
        count,
        states,
        bases,
        slots,
        places,
        address(out),
        out.strides[0],
        job.rows,
        job.columns.groups,
        scale,
        offset,
        address(marked),
        len(marked) - 1,
        0 if job.marked is None else -1,
    )


def _addresses(stream: Stream, kept: list[npt.NDArray[Any]]) -> tuple[int, int]:
    """Of the words, with as much behind them as a kernel may read, the states or else zeros; and of the states."""
    if stream.address:
        return stream.address, stream.address + 2 * len(stream.words)
    kept.append(np.concatenate([stream.words, _BEHIND]))
    return address(kept[-1]), address(stream.states)


# ---- checks ------------------------------------------------------------------------------------------------------


def _check(job: Decoding) -> None:
    """Everything that a kernel relies upon to stay inside its arrays."""
    if not job.stream.address:
        _check_stream(job.stream)
    out, held = job.out, HELD.get(job.form)
    if out.ndim != 2 or out.dtype != held or len(out) != job.rows or not out.flags.behaved:
        raise ValueError(f"output is {job.form}, [rows, stride], aligned, and can be written")
    if out.size and out.strides[1] != out.itemsize:
        raise ValueError("output rows are contiguous")
    if job.columns.reach > out.shape[1]:
        raise ValueError("a place outside of the output")
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
    return job.scaling is None and fits


# ---- without machine code ----------------------------------------------------------------------------------------


def _decode_in_numpy(kind: str, job: Decoding) -> None:
    """The same by the reference."""
    wanted = (job.columns.places[:, None] + np.arange(BLOCK)).reshape(-1)
    coarse = job.out[:, wanted].astype(np.int32) if kind == ir_decode.REFINE else None
    contexts = None if coarse is None else np.minimum(np.abs(coarse), MOST_CONTEXT).astype(np.uint8)
    symbols = reference.decode(job.stream, job.rows, job.columns.ids, job.columns.tables, contexts)
    numbers = symbols.astype(np.int32) - ZERO
    if coarse is not None:
        numbers = 3 * coarse + np.where(coarse < 0, -numbers, numbers)
    values = _in_form(job, numbers)
    if job.marked is not None:
        escapes = symbols == ESCAPE
        _check_escapes(job, int(escapes.sum()))
        values[escapes] = job.marked
    job.out[:, wanted] = values


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
