"""Decode streams on a GPU: the bytes of `reference.py`, a batch of streams a launch, one warp a stream.

A stream is sequential and short of work for a GPU; what fills one is many streams (layers, sides, chunks) at once. Its
64 lanes are two halves of 32, one lane of each a thread, so that lanes that want a word are counted by two ballots. One
step's columns are two groups of 32 for the same reason.

Nothing imports triton before the first batch: kvtool works without it. With `TRITON_INTERPRET=1` in the environment of
a process that has not imported triton yet, the same kernel runs on the CPU (slowly; bfloat16 is truncated there).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec.entropy.reference import LANES, LEAST_STATE, U16, Stream, check_ids
from kvtool.core.codec.entropy.tables import PROBABILITY_BITS, ZERO, TableSet
from kvtool.core.common.installing import install_line
from kvtool.core.errors import DamagedError, KvtoolError

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

Form = Literal["int16", "bfloat16", "float16"]
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

GROUP = 32
MOST_CONTEXT = 2
_DTYPES = {"int16": torch.int16, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FIELDS = 12  # rows, blocks of 64 columns, words; addresses: 6 arrays of the job, slots, out; out's stride
_ALIGNMENT = 16
_slots: weakref.WeakKeyDictionary[TableSet, dict[torch.device, torch.Tensor]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class CudaDecoding:
    """One stream and where its numbers go: `out[row, places[column // 32] + column % 32]`.

    Parameters
    ----------
    ids : table of each column, uint16 `[columns]`; `columns` is a multiple of 64.
    places : first column in `out` of every 32 columns, int32 `[columns // 32]`; they must not overlap.
    out : `[rows, stride]` on the device, of the form's dtype, rows of adjacent numbers; what no place names is kept.
    form : "int16": symbol - 128; else that times scale plus offset in float32, each rounded, then rounded to `form`.
    scale, offset : float32 `[columns]`; unused for "int16".
    """

    stream: Stream
    ids: U16
    tables: TableSet
    rows: int
    places: I32
    out: torch.Tensor
    form: Form
    scale: F32 | None = None
    offset: F32 | None = None


def decode_batch_cuda(jobs: Sequence[CudaDecoding], device: torch.device) -> None:
    """Fill every job's `out`, in one launch a form; waits for the result.

    Raises
    ------
    DamagedError : a table that does not exist, or a stream that does not end as `reference.check_end` demands. What
        `out` then holds is of no use.
    ValueError : a job whose arrays do not fit each other.
    KvtoolError : there is no triton.
    """
    for form in dict.fromkeys(job.form for job in jobs):
        _launch([job for job in jobs if job.form == form], device, refine=False)


def refine_batch_cuda(jobs: Sequence[CudaDecoding], device: torch.device) -> None:
    """Refine, in place, the coarser numbers q that every job's `out` (int16) holds, by the next level's streams.

    A column's table is `ids` + min(|q|, 2); q becomes 3 q + r, or 3 q - r where q < 0, with r = symbol - 128.

    Raises
    ------
    DamagedError : as in `decode_batch_cuda`; a column needs three tables, whatever q is.
    ValueError : a job whose arrays do not fit each other, or that is not "int16".
    KvtoolError : there is no triton.
    """
    if any(job.form != "int16" for job in jobs):
        raise ValueError("only int16 numbers can be refined")
    _launch(jobs, device, refine=True)


def _launch(jobs: Sequence[CudaDecoding], device: torch.device, refine: bool) -> None:
    if not jobs:
        return
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    for job in jobs:
        check_ids(job.ids, job.tables, MOST_CONTEXT if refine else 0)
        _check(job, device)
    kernel = _kernel()
    described = _described(jobs, device)
    ends = torch.empty((len(jobs), 2), dtype=torch.int32, device=device)
    options = constants(jobs[0].form, refine, ballot=device.type == "cuda")
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        # Without fused multiply-add: the numbers of the CPU's coders, bit for bit.
        kernel[(len(jobs),)](described, ends, **options, num_warps=1, enable_fp_fusion=False)
    expected = torch.tensor([(len(job.stream.words), LANES) for job in jobs], dtype=torch.int32)
    if not torch.equal(ends.cpu(), expected):
        raise DamagedError("an encoded stream that does not end where it should")


def _check(job: CudaDecoding, device: torch.device) -> None:
    """Everything that the kernel relies upon to stay inside its arrays."""
    columns, words, states = len(job.ids), job.stream.words, job.stream.states
    if len(states) != LANES or states.dtype != np.uint32 or words.dtype != np.uint16 or job.ids.dtype != np.uint16:
        raise ValueError("a stream or table ids of the wrong type")
    if job.rows * columns >= 1 << 31 or len(words) >= 1 << 31:
        raise ValueError("a stream of more symbols than an int32 counts")
    if job.out.dtype != _DTYPES[job.form] or job.out.device != device or job.out.ndim != 2:
        raise ValueError(f"decoding to {job.form} needs such a matrix on {device}")
    if len(job.out) != job.rows or (job.out.numel() and job.out.stride(1) != 1):
        raise ValueError("an output of the wrong shape")
    if job.places.shape != (columns // GROUP,) or job.places.dtype != np.int32:
        raise ValueError("a place is needed for every 32 columns")
    if columns and not 0 <= int(job.places.min()) <= int(job.places.max()) <= job.out.shape[1] - GROUP:
        raise ValueError("a place outside the output")
    for factors in () if job.form == "int16" else (job.scale, job.offset):
        if factors is None or factors.shape != (columns,) or factors.dtype != np.float32:
            raise ValueError(f"decoding to {job.form} needs a scale and an offset for every column")


def _described(jobs: Sequence[CudaDecoding], device: torch.device) -> torch.Tensor:
    """Descriptors of the jobs, int64 `[jobs, 12]`, on the device, followed by all that they point to: one upload."""
    rows = np.zeros((len(jobs), _FIELDS), np.int64)
    parts: list[npt.NDArray[Any]] = [rows]
    starts, at = [0], _aligned(rows.nbytes)
    for job in jobs:
        for part in (job.stream.words, job.stream.states, job.ids, job.places, job.scale, job.offset):
            parts.append(np.empty(0) if part is None else np.ascontiguousarray(part))
            starts.append(at)
            at += _aligned(parts[-1].nbytes)
    buffer = torch.empty(at, dtype=torch.uint8, device=device)
    rows[:, 3:9] = np.reshape(starts[1:], (len(jobs), 6)) + buffer.data_ptr()
    for row, job in zip(rows, jobs, strict=True):
        row[:3] = job.rows, len(job.ids) // LANES, len(job.stream.words)
        row[9:] = _slots_on(job.tables, device).data_ptr(), job.out.data_ptr(), job.out.stride(0)
    host = torch.empty(at, dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = host.numpy()
    for start, part in zip(starts, parts, strict=True):
        view[start : start + part.nbytes] = part.reshape(-1).view(np.uint8)
    return buffer.copy_(host, non_blocking=True).view(torch.int64)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _slots_on(tables: TableSet, device: torch.device) -> torch.Tensor:
    """The set's slots on the device, uploaded once and kept as long as the set is."""
    copies = _slots.setdefault(tables, {})
    if device not in copies:
        copies[device] = torch.from_numpy(tables.slots).to(device)
    return copies[device]


def constants(form: Form, refine: bool, ballot: bool) -> dict[str, Any]:
    """What a kernel is compiled for; `ballot`: count by PTX instead of a scan, which only real hardware can."""
    dtype = getattr(_kernel().fn.__globals__["tl"], form)
    return {
        "FORM": dtype,
        "REFINE": refine,
        "BALLOT": ballot,
        "BITS": PROBABILITY_BITS,
        "ZERO": ZERO,
        "LEAST": LEAST_STATE,
    }


@functools.cache
def _kernel() -> Any:
    """The kernel, of which triton makes one for each set of `constants`.

    A kernel finds triton's language and the functions that it calls among its module's globals, so these are put there
    at the first use instead of by decorators and an import, which would need triton for importing this module.
    """
    try:
        import triton
        import triton.language
    except ImportError as error:
        raise KvtoolError(
            "decoding on the GPU needs triton", f"{install_line('triton')}, or decode on the CPU"
        ) from error
    globals()["tl"] = triton.language
    for function in (_ahead, _ranks, _refilled, _number):
        globals()[function.__name__] = triton.jit(function)
    return triton.jit(_decode)


# Below: Triton. Its code cannot use this module's numbers, hence the literals: 12 fields, 64 lanes, 32 threads a warp.


def _decode(
    descriptors: tl.tensor,
    ends: tl.tensor,
    FORM: tl.constexpr,
    REFINE: tl.constexpr,
    BALLOT: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    LEAST: tl.constexpr,
) -> None:
    """One stream a program. `ends` int32 `[jobs, 2]`: words wanted, lanes that ended in 2^16."""
    job = descriptors + tl.program_id(0) * 12
    blocks = tl.load(job + 1).to(tl.int32)
    steps = tl.load(job).to(tl.int32) * blocks
    count = tl.load(job + 2).to(tl.int32)
    words = tl.load(job + 3).to(tl.pointer_type(tl.uint16))
    states = tl.load(job + 4).to(tl.pointer_type(tl.uint32))
    ids = tl.load(job + 5).to(tl.pointer_type(tl.uint16))
    places = tl.load(job + 6).to(tl.pointer_type(tl.int32))
    scale = tl.load(job + 7).to(tl.pointer_type(tl.float32))
    offset = tl.load(job + 8).to(tl.pointer_type(tl.float32))
    slots = tl.load(job + 9).to(tl.pointer_type(tl.uint32))
    out = tl.load(job + 10).to(tl.pointer_type(FORM))
    stride = tl.load(job + 11)
    lane = tl.arange(0, 32)
    low, high = tl.load(states + lane), tl.load(states + 32 + lane)
    position = tl.zeros([32], tl.int32)
    row, block = 0, 0
    table_low, q_low, to_low = _ahead(ids, places, out, stride, 0, 0, steps > 0, REFINE)
    table_high, q_high, to_high = _ahead(ids, places, out, stride, 0, 1, steps > 0, REFINE)
    for step in range(steps):
        # This step's slots, then at once all that the next step needs and this step's states have no say in: the time
        # from one state to the next is what decoding takes.
        if REFINE:
            table_low += tl.minimum(tl.abs(q_low), 2)
            table_high += tl.minimum(tl.abs(q_high), 2)
        entry_low = tl.load(slots + (table_low << BITS) + (low & ((1 << BITS) - 1)).to(tl.int32))
        entry_high = tl.load(slots + (table_high << BITS) + (high & ((1 << BITS) - 1)).to(tl.int32))
        before_low, before_high, at_low, at_high, column = q_low, q_high, to_low, to_high, block * 64
        row = tl.where(block + 1 == blocks, row + 1, row)
        block = tl.where(block + 1 == blocks, 0, block + 1)
        more = step + 1 < steps
        table_low, q_low, to_low = _ahead(ids, places, out, stride, row, 2 * block, more, REFINE)
        table_high, q_high, to_high = _ahead(ids, places, out, stride, row, 2 * block + 1, more, REFINE)
        low = ((entry_low >> 8) & 4095) * (low >> BITS) + (entry_low >> 20)
        high = ((entry_high >> 8) & 4095) * (high >> BITS) + (entry_high >> 20)
        rank_low, rank_high, taken = _ranks(low < LEAST, high < LEAST, BALLOT)
        low = _refilled(low, words, position + rank_low, count, LEAST)
        high = _refilled(high, words, position + rank_high, count, LEAST)
        position += taken
        low_here = _number(entry_low, before_low, scale + column, offset + column, FORM, REFINE, ZERO)
        column += 32
        high_here = _number(entry_high, before_high, scale + column, offset + column, FORM, REFINE, ZERO)
        tl.store(at_low, low_here)  # both after all loads, which must not wait for them
        tl.store(at_high, high_here)
    ends += tl.program_id(0) * 2
    tl.store(ends, tl.max(position, 0))
    tl.store(ends + 1, tl.sum((low == LEAST).to(tl.int32) + (high == LEAST).to(tl.int32), 0))


def _ahead(
    ids: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    row: tl.tensor,
    group: tl.tensor,
    valid: tl.tensor,
    REFINE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Table ids of 32 columns, the coarser numbers there, and pointers to where their numbers go."""
    lane = tl.arange(0, 32)
    table = tl.load(ids + group * 32 + lane, mask=valid, other=0).to(tl.int32)
    to = out + row * stride + tl.load(places + group, mask=valid, other=0) + lane
    q = tl.load(to, mask=valid, other=0).to(tl.int32) if REFINE else table
    return table, q, to


def _ranks(low: tl.tensor, high: tl.tensor, BALLOT: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """How many lanes before each lane of the halves want a word, and how many do in all."""
    if BALLOT:
        # Two halves of 32 lanes in a warp of 32 threads: thread i has lane i of both.
        rank_low, rank_high, taken = tl.inline_asm_elementwise(
            """{ .reg .pred a, b; .reg .b32 lows, highs, before, here;
            setp.ne.b32 a, $3, 0; vote.sync.ballot.b32 lows, a, 0xffffffff;
            setp.ne.b32 b, $4, 0; vote.sync.ballot.b32 highs, b, 0xffffffff;
            mov.u32 before, %lanemask_lt;
            popc.b32 $2, lows;
            and.b32 here, lows, before; popc.b32 $0, here;
            and.b32 here, highs, before; popc.b32 $1, here; add.u32 $1, $1, $2;
            popc.b32 here, highs; add.u32 $2, $2, here; }""",
            "=&r,=&r,=&r,r,r",
            [low.to(tl.int32), high.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        # Both halves in one scan: neither count exceeds 32.
        both = low.to(tl.int32) + (high.to(tl.int32) << 16)
        before, total = tl.cumsum(both, 0) - both, tl.sum(both, 0)
        rank_low, rank_high = before & 65535, (before >> 16) + (total & 65535)
        taken = (total & 65535) + (total >> 16)
    return rank_low, rank_high, taken


def _refilled(state: tl.tensor, words: tl.tensor, at: tl.tensor, count: tl.tensor, LEAST: tl.constexpr) -> tl.tensor:
    """States with a word taken in where they want one; past the stream's own words there are zeros."""
    empty = state < LEAST
    word = tl.load(words + at, mask=empty & (at < count), other=0).to(tl.uint32)
    return tl.where(empty, (state << 16) | word, state)


def _number(
    entry: tl.tensor,
    before: tl.tensor,
    scale: tl.tensor,
    offset: tl.tensor,
    FORM: tl.constexpr,
    REFINE: tl.constexpr,
    ZERO: tl.constexpr,
) -> tl.tensor:
    """What is stored for the symbols of 32 columns."""
    lane = tl.arange(0, 32)
    number = (entry & 255).to(tl.int32) - ZERO
    if REFINE:
        number = 3 * before + tl.where(before < 0, -number, number)
    elif tl.int16 != FORM:
        number = number.to(tl.float32) * tl.load(scale + lane) + tl.load(offset + lane)
    return number.to(FORM)
