"""The Triton decoder: the reference's numbers over golden files, many shapes and mutated records; its speed."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from kvtool.core.codec import CODECS, transform
from kvtool.core.codec.backend import CpuBackend, GpuBackend
from kvtool.core.codec.base import Encoded
from kvtool.core.codec.levels import NESTED
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.record import Record
from kvtool.core.errors import DamagedError
from samples.benchmarks.gpu_day.day import Day, milliseconds
from tests.codec import test_golden_levels as golden
from tests.codec.synthetic import Model, encoded, fitted, model, profile, shelf

_MUTATIONS = 400  # of each kind of record


def run(day: Day) -> None:
    day.step("golden files", lambda: _golden(day))
    for heads, dim in ((1, 16),) if day.dry else ((1, 16), (2, 24), (2, 64), (4, 80), (8, 128)):
        day.step(f"shapes {heads} x {dim}", partial(_shapes, day, heads, dim))
    for level in NESTED[:1] if day.dry else NESTED:
        day.step(f"mutated, level {level}", partial(_mutated, day, level))
    for level in ("1",) if day.dry else ("1", "2"):
        for chunks in (2,) if day.dry else (1, 8, 64):
            day.step(
                f"speed, level {level}, {chunks} chunks",
                partial(_speed, day, level, chunks),
                least_s=60 if not day.dry else 5,
            )


def _golden(day: Day) -> dict[str, int]:
    of, like = Profile.from_bytes(golden.stored("profile")), torch.empty((golden.HEADS, golden.TOKENS, golden.DIM))
    names = golden.TRANSFORMED[:2] if day.dry else golden.TRANSFORMED
    for name in names:
        _same(day, [golden.committed(name, like)], of, name)
    return {"files": len(names)}


def _shapes(day: Day, heads: int, dim: int) -> dict[str, int]:
    """Chunks of several lengths in one batch, levels that refine each other, numbers that no symbol stands for."""
    source = Model(heads, dim)
    of = fitted(source, tokens=2 * heads * dim + 200)
    count = 0
    for tokens in ((1, 5),) if day.dry else ((1, 5), (3, 64, 130)):
        kvs = [source.kv(0, number, seed=number, dtype=torch.bfloat16) for number in tokens]
        kvs[0][0][0, 0] += 400.0
        chains = [encoded(keys, values, NESTED, of) for keys, values in kvs]
        for level in NESTED:
            _same(day, [chain[level] for chain in chains], of, f"{heads} x {dim}, level {level}, {tokens}")
            count += len(chains)
    return {"records": count}


def _numbers(items: Sequence[Encoded], of: Profile, device: str | None) -> torch.Tensor:
    """The whole numbers of all records, int16 `[tokens, stride]`."""
    ends = list(accumulate(item.shape[1] for item in items))
    shape = (ends[-1], of.layout.stride)
    numbers = torch.zeros(shape, dtype=torch.int16, device=device)
    backend = CpuBackend() if device is None else GpuBackend(torch.device(device))
    records = [(Record.parse(item.payload), item) for item in items]
    transform.fill(of, [(0, records, [0, *ends[:-1]])], numbers, backend)
    return numbers.cpu()


def _same(day: Day, items: Sequence[Encoded], of: Profile, what: str) -> None:
    """The same numbers, bit for bit, and tensors that differ by their rounding from those of float32."""
    ours, wanted = _numbers(items, of, day.device), _numbers(items, of, None)
    if not torch.equal(ours, wanted):
        raise AssertionError(f"{what}: {int((ours != wanted).sum())} of {wanted.numel()} numbers differ")
    level = NESTED[Record.parse(items[0].payload).level - 1]
    device = torch.device(day.device)
    found, wide = CODECS[level].decode(items, 0, shelf(of), device), [_in_float32(item) for item in items]
    for pair, exact in zip(found, CODECS[level].decode(wide, 0, shelf(of)), strict=True):
        for side, right in zip(pair, exact, strict=True):
            wrong = (side.cpu().double() - right.double()).norm() / right.double().norm()
            if not wrong < (1e-5 if side.dtype == torch.float32 else 4e-3):
                raise AssertionError(f"{what}: off by {float(wrong):.2g}")


def _in_float32(item: Encoded) -> Encoded:
    """The same record, to be decoded to float32."""
    return replace(item, dtype="float32", base=None if item.base is None else _in_float32(item.base))


def _mutated(day: Day, level: str) -> dict[str, int]:
    """A bit, a byte, or the end of a record is changed: either both refuse it, or both give the same numbers."""
    of, draw = profile(), random.Random(int(level))
    item = encoded(*model().kv(0, 9, dtype=torch.bfloat16), [level], of)[level]
    refused = same = 0
    ends = time.monotonic() + min(60, max(5, day.left() / 4))
    for _ in range(4 if day.dry else _MUTATIONS):
        if time.monotonic() > ends:
            break
        changed = replace(item, payload=_mutation(bytearray(item.payload), draw))
        wanted, ours = (_outcome(changed, of, device) for device in (None, day.device))
        if (wanted is None) != (ours is None):
            raise AssertionError(f"one refuses what the other takes: {bytes(changed.payload).hex()}")
        if wanted is None or ours is None:
            refused += 1
        elif torch.equal(wanted, ours):
            same += 1
        else:
            raise AssertionError(f"other numbers: {bytes(changed.payload).hex()}")
    return {"refused by both": refused, "the same in both": same}


def _mutation(data: bytearray, draw: random.Random) -> bytes:
    kind, at = draw.randrange(3), draw.randrange(len(data))
    if kind == 0:
        data[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        data[at] = draw.randrange(256)
    else:
        del data[at:]
    return bytes(data)


def _outcome(item: Encoded, of: Profile, device: str | None) -> torch.Tensor | None:
    try:
        return _numbers([item], of, device)
    except (DamagedError, ValueError):  # the latter of a record that is longer than it is said to be, as a reader sees
        return None


def _speed(day: Day, level: str, chunks: int) -> dict[str, float]:
    """A layer of a 7B model, 512 tokens a chunk: GB/s of raw 16-bit numbers."""
    heads, dim, tokens = (1, 16, 8) if day.dry else (8, 128, 512)
    source = Model(heads, dim)
    of = fitted(source, groups=1 if day.dry else 8, tokens=600)
    item = encoded(*source.kv(0, tokens, dtype=torch.bfloat16), [level], of)[level]
    items = [item] * chunks
    raw = 4 * heads * dim * tokens * chunks
    device = torch.device(day.device)
    there = torch.ones(raw, dtype=torch.uint8, device=device)
    other = torch.empty_like(there)
    wide = torch.ones(raw // 2, dtype=torch.int16)
    repeat = 1 if day.dry else 10

    def filled() -> None:
        _on_device(items, of, device)

    whole = milliseconds(lambda: CODECS[level].decode(items, 0, shelf(of), device), day.device, repeat)
    return {
        "entropy_gb_per_s": raw / milliseconds(filled, day.device, repeat) / 1e6,
        "whole_gb_per_s": raw / whole / 1e6,
        "cpu_whole_gb_per_s": raw / milliseconds(lambda: CODECS[level].decode(items, 0, shelf(of)), "cpu", 1) / 1e6,
        "device_copy_gb_per_s": raw / milliseconds(lambda: other.copy_(there), day.device) / 1e6,
        "upload_raw_gb_per_s": raw / milliseconds(lambda: wide.to(device), day.device, repeat) / 1e6,
        "bits_per_number": 8 * len(item.payload) / (raw / 2 / chunks),
    }


def _on_device(items: Sequence[Encoded], of: Profile, device: torch.device) -> torch.Tensor:
    ends = list(accumulate(item.shape[1] for item in items))
    numbers = torch.zeros((ends[-1], of.layout.stride), dtype=torch.int16, device=device)
    records = [(Record.parse(item.payload), item) for item in items]
    transform.fill(of, [(0, records, [0, *ends[:-1]])], numbers, GpuBackend(device))
    return numbers
