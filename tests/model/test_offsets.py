"""Offsets added to runs of rows by machine code are what torch makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtool.core.model.offsets import Runs, add_offsets
from kvtool.core.model.rotary import Table
from kvtool.core.native.compiling import ISAS, runnable

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NATIVE = [name for name in runnable() if name != "scalar"]
COUNT = 50
SPANS = [(0, 7), (9, 9), (9, 10), (12, 44)]
pytestmark = pytest.mark.skipif(not runnable(), reason="there is no compiler")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def table_of(rows: int, rotary_dim: int) -> Table:
    cos, sin = (random(1, rows, rotary_dim // 2, seed=side).repeat(1, 1, 2) for side in (1, 2))
    return Table(cos, sin)


def runs_of(rotary_dim: int) -> Runs:
    factors = random(COUNT, seed=3).abs()
    factors[::5] = 0
    return Runs(np.array(SPANS, np.int64), factors, table_of(COUNT, rotary_dim))


def by_torch(rows: torch.Tensor, offsets: torch.Tensor, runs: Runs, turned: bool) -> torch.Tensor:
    rows = rows.clone()
    for run, (start, stop) in enumerate(SPANS):
        more = runs.factors[start:stop, None] * offsets[:, run, None]
        if turned:
            table, size = runs.table[slice(start, stop)], runs.table.cos.shape[2]
            low, high = more[..., :size].chunk(2, -1)
            ahead = more[..., :size] * table.cos[0] + torch.cat([-high, low], -1) * table.sin[0]
            more = torch.cat([ahead, more[..., size:]], -1)
        rows[:, start:stop] = (rows[:, start:stop].float() + more).to(rows.dtype)
    return rows


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 64), (64, 32), (80, 80), (256, 64)])
def test_it_is_what_torch_gives(isa: str, dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    """Keys and values in one call, in buffers with room behind; nothing beside the runs is touched."""
    room = [random(3, COUNT + 6, head_dim, seed=side).to(dtype) for side in range(2)]
    room[0][0, 3, 2] = torch.nan
    runs = runs_of(rotary_dim)
    offsets = [random(3, len(SPANS), head_dim, seed=4 + side) for side in range(2)]
    expected = [
        by_torch(rows, each, runs, not side) for side, (rows, each) in enumerate(zip(room, offsets, strict=True))
    ]
    assert add_offsets([(room[0], offsets[0], True), (room[1], offsets[1], False)], runs, ISAS[isa])
    for found, right in zip(room, expected, strict=True):
        torch.testing.assert_close(found, right, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("isa", NATIVE)
def test_rows_apart_and_heads_in_another_order(isa: str) -> None:
    rows = random(COUNT, 2, 16).transpose(0, 1)
    offsets = random(len(SPANS), 2, 16, seed=7).transpose(0, 1)
    runs = runs_of(16)
    expected = by_torch(rows, offsets, runs, True)
    assert add_offsets([(rows, offsets, True)], runs, ISAS[isa])
    torch.testing.assert_close(rows, expected, rtol=0, atol=0)


def test_what_machine_code_does_not_know_is_refused_and_left_alone() -> None:
    rows, offsets, runs, isa = random(2, COUNT, 16), random(2, len(SPANS), 16), runs_of(16), ISAS[runnable()[0]]
    assert runs.fits
    good, before = (rows, offsets, True), rows.clone()
    for bad in (
        (random(2, COUNT, 32)[..., ::2], offsets, True),
        (rows.double(), offsets, True),
        (rows[:, : COUNT - 1], offsets, True),
        (rows, random(3, len(SPANS), 16), True),
        (rows, offsets[:, 1:], True),
        (rows, offsets.double(), True),
        (random(2, COUNT, 12), random(2, len(SPANS), 12), False),
        (random(2, COUNT, 8), random(2, len(SPANS), 8), True),
        (rows.half(), offsets, True),
    ):
        assert not add_offsets([good, bad], runs, isa)
    assert torch.equal(rows, before)


def test_runs_that_reach_beyond_their_rows_do_not_fit() -> None:
    runs = runs_of(16)
    for spans in ([(0, COUNT + 1)], [(-1, 3)], [(5, 4)]):
        assert not replace(runs, spans=np.array(spans, np.int64)).fits
    assert not replace(runs, factors=torch.ones(2 * COUNT)[::2]).fits
    assert not replace(runs, factors=runs.factors.double()).fits
    assert not replace(runs, table=table_of(COUNT - 1, 16)).fits
    assert not replace(runs, table=table_of(COUNT, 20)).fits
