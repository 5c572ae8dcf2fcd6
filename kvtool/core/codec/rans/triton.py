"""rANS decoder for GPUs, in Triton: a batch of streams a launch, one warp a stream (the bytes: tables.py).

A stream is sequential and short of work for a GPU, which many streams (layers, sides, chunks) at once fill. Its 64
lanes are two halves of 32, one lane of each a thread, so that two ballots count the lanes that need a word. One step's
columns are two groups of 32 for the same reason.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec.rans.tables import LANES, LEAST_STATE, PROBABILITY_BITS, ZERO, Columns, Stream, TableSet
from kvtool.core.errors import DamagedError
from kvtool.core.native.jit import jit

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

_FIELDS = 10  # rows, blocks of 64 columns, words; addresses: 4 arrays of the job, slots, out; out's stride
_ALIGNMENT = 16
_slots: weakref.WeakKeyDictionary[TableSet, dict[torch.device, torch.Tensor]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class CudaDecoding:
    stream: Stream
    columns: Columns
    out: torch.Tensor  # int16 `[rows, stride]` on the device; numbers outside the columns' places are kept


def decode_batch_cuda(jobs: Sequence[CudaDecoding], device: torch.device) -> None:
    """Fill every job's `out` in one launch, as `coder.decode` does, and wait for it.

    Raises DamagedError: a stream does not end as an encoder began, and `out` holds nothing usable; ValueError: a job's
    arrays do not fit each other, or only some jobs' columns refine; KvtoolError: triton is missing.
    """
    if not jobs:
        return
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    for job in jobs:
        _check(job, device)
    if len({job.columns.refines for job in jobs}) > 1:
        raise ValueError("all columns refine, or none does")
    described = _described(jobs, device)
    ends = torch.empty((len(jobs), 2), dtype=torch.int32, device=device)
    options = constants(jobs[0].columns.refines, ballot=device.type == "cuda")
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        _kernel()[(len(jobs),)](described, ends, **options, num_warps=1)
    expected = torch.tensor([(len(job.stream.words), LANES) for job in jobs], dtype=torch.int32)
    if not torch.equal(ends.cpu(), expected):
        raise DamagedError("an encoded stream that does not end where it should")


def _check(job: CudaDecoding, device: torch.device) -> None:
    if job.out.dtype != torch.int16 or job.out.device != device or job.out.ndim != 2:
        raise ValueError(f"decoding needs an int16 matrix on {device}")
    if len(job.out) * len(job.columns) >= 1 << 31 or len(job.stream.words) >= 1 << 31:
        raise ValueError("a stream of more symbols than an int32 counts")
    if job.out.numel() and job.out.stride(1) != 1:
        raise ValueError("an output of the wrong shape")
    if job.columns.reach > job.out.shape[1]:
        raise ValueError("a place outside the output")


def _described(jobs: Sequence[CudaDecoding], device: torch.device) -> torch.Tensor:
    rows = np.zeros((len(jobs), _FIELDS), np.int64)
    parts: list[npt.NDArray[Any]] = [rows]
    starts, at = [0], _aligned(rows.nbytes)
    for job in jobs:
        for part in (job.stream.words, job.stream.states, job.columns.ids, job.columns.places):
            parts.append(np.ascontiguousarray(part))
            starts.append(at)
            at += _aligned(parts[-1].nbytes)
    buffer = torch.empty(at, dtype=torch.uint8, device=device)
    rows[:, 3:7] = np.reshape(starts[1:], (len(jobs), 4)) + buffer.data_ptr()
    for row, job in zip(rows, jobs, strict=True):
        row[:3] = len(job.out), job.columns.groups, len(job.stream.words)
        row[7:] = _slots_on(job.columns.tables, device).data_ptr(), job.out.data_ptr(), job.out.stride(0)
    host = torch.empty(at, dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = host.numpy()
    for start, part in zip(starts, parts, strict=True):
        view[start : start + part.nbytes] = part.reshape(-1).view(np.uint8)
    return buffer.copy_(host, non_blocking=True).view(torch.int64)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _slots_on(tables: TableSet, device: torch.device) -> torch.Tensor:
    copies = _slots.setdefault(tables, {})
    if device not in copies:
        copies[device] = torch.from_numpy(tables.slots).to(device)
    return copies[device]


def constants(refine: bool, ballot: bool) -> dict[str, Any]:
    """Return a kernel's compile-time arguments; `ballot`: count by PTX, which only hardware can, instead of a scan."""
    return {"REFINE": refine, "BALLOT": ballot, "BITS": PROBABILITY_BITS, "ZERO": ZERO, "LEAST": LEAST_STATE}


@functools.cache
def _kernel() -> Any:
    return jit(_decode, _ahead, _ranks, _refilled, _number)


# Below: Triton. Its code cannot use this module's numbers, hence the literals: 10 fields, 64 lanes, 32 threads a warp.


def _decode(
    descriptors: tl.tensor, ends: tl.tensor, REFINE: tl.constexpr, BALLOT: tl.constexpr, BITS: tl.constexpr,
    ZERO: tl.constexpr, LEAST: tl.constexpr,
) -> None:  # fmt: skip
    """Decode one stream a program. `ends` int32 `[jobs, 2]`: words wanted, lanes that ended in 2^16."""
    job = descriptors + tl.program_id(0) * 10
    blocks = tl.load(job + 1).to(tl.int32)
    steps = tl.load(job).to(tl.int32) * blocks
    count = tl.load(job + 2).to(tl.int32)
    words = tl.load(job + 3).to(tl.pointer_type(tl.uint16))
    states = tl.load(job + 4).to(tl.pointer_type(tl.uint32))
    ids = tl.load(job + 5).to(tl.pointer_type(tl.uint16))
    places = tl.load(job + 6).to(tl.pointer_type(tl.int32))
    slots = tl.load(job + 7).to(tl.pointer_type(tl.uint32))
    out = tl.load(job + 8).to(tl.pointer_type(tl.int16))
    stride = tl.load(job + 9)
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
        before_low, before_high, at_low, at_high = q_low, q_high, to_low, to_high
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
        low_here = _number(entry_low, before_low, REFINE, ZERO)
        high_here = _number(entry_high, before_high, REFINE, ZERO)
        tl.store(at_low, low_here)  # both after all loads, which must not wait for them
        tl.store(at_high, high_here)
    ends += tl.program_id(0) * 2
    tl.store(ends, tl.max(position, 0))
    tl.store(ends + 1, tl.sum((low == LEAST).to(tl.int32) + (high == LEAST).to(tl.int32), 0))


def _ahead(
    ids: tl.tensor, places: tl.tensor, out: tl.tensor, stride: tl.tensor, row: tl.tensor, group: tl.tensor,
    valid: tl.tensor, REFINE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    lane = tl.arange(0, 32)
    table = tl.load(ids + group * 32 + lane, mask=valid, other=0).to(tl.int32)
    to = out + row * stride + tl.load(places + group, mask=valid, other=0) + lane
    q = tl.load(to, mask=valid, other=0).to(tl.int32) if REFINE else table
    return table, q, to


def _ranks(low: tl.tensor, high: tl.tensor, BALLOT: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Count the lanes before each lane of the halves that need a word, and all that do."""
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
    empty = state < LEAST
    word = tl.load(words + at, mask=empty & (at < count), other=0).to(tl.uint32)
    return tl.where(empty, (state << 16) | word, state)


def _number(entry: tl.tensor, before: tl.tensor, REFINE: tl.constexpr, ZERO: tl.constexpr) -> tl.tensor:
    number = (entry & 255).to(tl.int32) - ZERO
    if REFINE:
        number = 3 * before + tl.where(before < 0, -number, number)
    return number.to(tl.int16)
