"""One offset added to many rows by machine code is what torch makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvtool.core.model.offsets import Offset, add_offsets
from kvtool.core.model.rotary import Table
from kvtool.core.native.compiling import ISAS, runnable

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NATIVE = [name for name in runnable() if name != "scalar"]
pytestmark = pytest.mark.skipif(not runnable(), reason="there is no compiler")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def table_of(rows: int, rotary_dim: int) -> Table | None:
    if not rotary_dim:
        return None
    cos, sin = (random(1, rows, rotary_dim // 2, seed=side).repeat(1, 1, 2) for side in (1, 2))
    return Table(cos, sin)


def by_torch(one: Offset) -> torch.Tensor:
    more = (one.factors[:, None] * one.offset[:, None]).clone()
    if one.table is not None:
        size = one.table.cos.shape[2]
        low, high = more[..., :size].chunk(2, -1)
        more[..., :size] = more[..., :size] * one.table.cos[0] + torch.cat([-high, low], -1) * one.table.sin[0]
    return (one.to.float() + more).to(one.to.dtype)


@pytest.mark.parametrize("isa", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(16, 16), (64, 0), (64, 64), (64, 32), (80, 80), (8, 0), (256, 64)]
)
def test_it_is_what_torch_gives(isa: str, dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    buffer = random(3, 50, head_dim).to(dtype)
    before = buffer.clone()
    factors = random(37, seed=3).abs()
    factors[::5] = 0
    offset = random(3, 4, head_dim, seed=4)[:, 1]  # a row of several, as chunks have
    one = Offset(buffer[:, 7:44], offset, factors, table_of(37, rotary_dim))
    expected = by_torch(one)
    assert add_offsets([one], ISAS[isa])
    torch.testing.assert_close(buffer[:, 7:44], expected, rtol=0, atol=0)
    assert torch.equal(buffer[:, :7], before[:, :7])
    assert torch.equal(buffer[:, 44:], before[:, 44:])
    assert torch.equal(buffer[:, 7:44:5], before[:, 7:44:5])  # factor 0: not touched


@pytest.mark.parametrize("isa", NATIVE)
def test_several_in_one_call_and_rows_that_are_no_numbers(isa: str) -> None:
    rows = [random(2, count, 16, seed=count).bfloat16() for count in (1, 9, 0)]
    rows[1][0, 3, 2] = torch.nan
    offsets = [Offset(to, random(2, 16, seed=9), torch.ones(to.shape[1])) for to in rows]
    expected = [by_torch(one) for one in offsets]
    assert add_offsets(offsets, ISAS[isa])
    for one, right in zip(offsets, expected, strict=True):
        torch.testing.assert_close(one.to, right, equal_nan=True, rtol=0, atol=0)


def test_what_machine_code_does_not_know_is_refused_and_left_alone() -> None:
    good = Offset(random(2, 5, 16), random(2, 16), torch.ones(5), table_of(5, 16))
    assert good.table is not None
    cut = Table(good.table.cos[:, :4], good.table.sin[:, :4])
    bad = [
        replace(good, to=random(2, 5, 32)[..., ::2]),
        replace(good, to=random(2, 5, 16).double()),
        replace(good, offset=random(3, 16)),
        replace(good, offset=random(2, 16).double()),
        replace(good, factors=torch.ones(4)),
        replace(good, factors=torch.ones(10)[::2]),
        replace(good, table=cut),
        replace(good, table=table_of(5, 32)),
        Offset(random(2, 5, 12), random(2, 12), torch.ones(5)),
    ]
    before = good.to.clone()
    for one in bad:
        assert not add_offsets([good, one], ISAS[runnable()[0]])
    assert not add_offsets([good, replace(good, to=good.to.half())], ISAS[runnable()[0]])
    assert torch.equal(good.to, before)
    assert add_offsets([], ISAS[runnable()[0]])
