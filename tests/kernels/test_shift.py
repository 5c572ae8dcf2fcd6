"""ShiftSpans of rows moved by machine code are what torch makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtool.core.kernels.rope import CosSin, RopeTables
from kvtool.core.kernels.shift import ShiftKernel, ShiftSpans
from kvtool.core.native.isa import ISAS, runnable
from kvtool.core.native.threads import use_pool
from tests.kernels.formulas import random, rotated
from tests.wording import refused

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One number of another rounding, of numbers below 8: sums over probes are added in another order.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
NATIVE = [name for name in runnable() if name != "scalar"]
COUNT = 50
SPANS = [(0, 7), (9, 10), (12, 44)]
PROBES = [[0, 5], [9], [12, 13, 20, 43]]
pytestmark = pytest.mark.skipif(not NATIVE, reason="there is no compiler")


def table_of(rows: int, rotary_dim: int) -> RopeTables:
    cos, sin = (random(1, rows, rotary_dim // 2, seed=side).repeat(1, 1, 2) for side in (1, 2))
    return RopeTables({"": CosSin(cos, sin)})


def runs_of(rotary_dim: int) -> ShiftSpans:
    factors = random(COUNT, seed=3).abs()
    factors[::5] = 0
    places = torch.tensor([row for rows in PROBES for row in rows])
    factors[places] = 0
    table = table_of(COUNT, rotary_dim)
    back = table[places].inverse()
    return ShiftSpans(np.array(SPANS), np.array([len(rows) for rows in PROBES]), places, factors, table, back)


def turned(rows: torch.Tensor, table: RopeTables) -> torch.Tensor:
    return rotated(rows, table.by_name[""].cos[0], table.by_name[""].sin[0])


def by_torch(
    rows: torch.Tensor, old: torch.Tensor, runs: ShiftSpans, rotated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows after it, and squares as `ShiftKernel.add` gives them of values."""
    rows, first, squares = rows.clone(), 0, []
    for (start, stop), probes in zip(SPANS, PROBES, strict=True):
        change = rows[:, probes].float() - old[:, probes].float()
        some, first = slice(first, first + len(probes)), first + len(probes)
        squares.append(change.square().sum((1, 2)))
        mean = (turned(change, runs.back[some]) if rotated else change).mean(1, keepdim=True)
        squares.append(mean.square().sum((1, 2)))
        more = runs.factors[start:stop, None] * mean
        if rotated:
            more = turned(more, runs.table[slice(start, stop)])
        touched = runs.factors[start:stop, None] != 0
        moved = (rows[:, start:stop].float() + more).to(rows.dtype)
        rows[:, start:stop] = torch.where(touched, moved, rows[:, start:stop])
    return rows, torch.stack(squares, -1).unflatten(-1, (-1, 2)).transpose(0, 1)


def moved_by_code(runs: ShiftSpans, sides: list[torch.Tensor], isa: str, rotated: bool = True) -> torch.Tensor:
    mover = ShiftKernel(runs, [(sides[0], sides[1])], ISAS[isa], ["" if rotated else None])
    mover.keep(0)
    written(sides, runs)
    return torch.stack(mover.add(0), -1)


def written(sides: list[torch.Tensor], runs: ShiftSpans) -> None:
    for number, side in enumerate(sides):
        side[:, runs.places] = random(len(side), len(runs.places), side.shape[2], seed=8 + number).to(side.dtype)


def check(sides: list[torch.Tensor], runs: ShiftSpans, isa: str, rotated: bool) -> None:
    old, new = [side.clone() for side in sides], [side.clone() for side in sides]
    written(new, runs)
    keys, _ = by_torch(new[0], old[0], runs, rotated)
    values, squares = by_torch(new[1], old[1], runs, False)
    sums = moved_by_code(runs, sides, isa, rotated)
    allowed = ALLOWED[sides[0].dtype]
    for found, right in zip(sides, (keys, values), strict=True):
        torch.testing.assert_close(found, right, equal_nan=True, rtol=0, atol=allowed)
    torch.testing.assert_close(sums, squares, rtol=1e-4, atol=1e-5)
    untouched = torch.ones(sides[0].shape[1], dtype=torch.bool)
    for start, stop in SPANS:
        untouched[start:stop] = runs.factors[start:stop] == 0
    for found, right in zip(sides, new, strict=True):
        assert torch.equal(found[:, untouched].nan_to_num(9), right[:, untouched].nan_to_num(9))


@pytest.mark.some(4)
@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 64), (64, 32), (80, 80), (128, 128), (256, 64)])
def test_it_is_what_torch_gives(isa: str, dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    sides = [random(3, COUNT + 6, head_dim, seed=side).to(dtype) for side in range(2)]
    sides[0][0, 3, 2] = torch.nan
    check(sides, runs_of(rotary_dim), isa, rotated=True)


@pytest.mark.parametrize("isa", NATIVE)
def test_keys_of_a_layer_without_rotation_and_heads_in_another_order(isa: str) -> None:
    sides = [random(COUNT, 2, 16, seed=side).transpose(0, 1) for side in range(2)]
    check(sides, runs_of(16), isa, rotated=False)


def test_helpers_give_the_same_bits() -> None:
    runs, isa = runs_of(128), NATIVE[0]
    alone, helped = ([random(16, COUNT, 128, seed=side) for side in range(2)] for _ in range(2))
    sums = moved_by_code(runs, alone, isa)
    with use_pool(2):
        for _ in range(20):
            again = [random(16, COUNT, 128, seed=side) for side in range(2)]
            assert torch.equal(moved_by_code(runs, again, isa), sums)
            helped = again
    assert all(torch.equal(one, other) for one, other in zip(alone, helped, strict=True))


def test_factors_of_one_layer_take_the_place_of_the_others() -> None:
    runs, layers = runs_of(16), [(random(2, COUNT, 16), random(2, COUNT, 16, seed=1)) for _ in range(2)]
    before = [side.clone() for side in layers[1]]
    mover = ShiftKernel(runs, layers, ISAS[NATIVE[0]], [""] * len(layers))
    mover.keep(0)
    mover.add(1, torch.zeros(COUNT))
    assert all(torch.equal(*pair) for pair in zip(before, layers[1], strict=True))
    for bad in (torch.zeros(COUNT - 1), torch.zeros(COUNT).double(), torch.zeros(2 * COUNT)[::2]):
        with refused(ValueError):
            mover.add(1, bad)


def test_what_machine_code_does_not_know_is_refused() -> None:
    runs, isa, good = runs_of(16), ISAS[NATIVE[0]], random(2, COUNT, 16)
    for bad in (
        random(2, COUNT, 32)[..., ::2],
        random(2, COUNT, 16).double(),
        random(2, COUNT - 1, 16),
        random(2, COUNT, 8),
        random(2, COUNT, 20),
    ):
        with refused(ValueError):
            ShiftKernel(runs, [(bad, bad)], isa, [""])
    for other in (random(3, COUNT, 16), good.half(), random(2, COUNT + 1, 16), random(COUNT, 2, 16).transpose(0, 1)):
        for layers in ([(good, other)], [(good, good), (other, good)]):
            with refused(ValueError):
                ShiftKernel(runs, layers, isa, [""] * len(layers))


def test_runs_that_reach_beyond_their_rows_do_not_fit() -> None:
    runs = runs_of(16)
    assert runs.fits
    for spans in ([(0, 7), (9, 10), (12, COUNT + 1)], [(-1, 7), (9, 10), (12, 44)], [(7, 0), (9, 10), (12, 44)]):
        assert not replace(runs, spans=np.array(spans)).fits
    for counts in ([2, 1, 3], [2, 0, 5], [2, 5]):
        assert not replace(runs, counts=np.array(counts)).fits
    beyond = runs.places.clone()
    beyond[-1] = COUNT
    assert not replace(runs, places=beyond).fits
    assert not replace(runs, places=runs.places.int()).fits
    assert not replace(runs, factors=torch.ones(2 * COUNT)[::2]).fits
    assert not replace(runs, factors=runs.factors.double()).fits
    assert not replace(runs, table=table_of(SPANS[-1][1] - 1, 16)).fits
    assert not replace(runs, back=table_of(len(runs.places) - 1, 16)).fits
    assert not replace(runs, back=table_of(len(runs.places), 32)).fits
