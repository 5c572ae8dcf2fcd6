"""Products over oneDNN's own layout: the same numbers, from the same memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kvtool.core.kernels.linear.onednn import (
    MOST_ROWS,
    ROWS,
    OneDnnBlockedWeight,
    ReorderedLinear,
    can_pack,
    pack_weights,
)

SIZES = [(64, 64), (128, 96), (192, 896), (256, 34)]  # outputs and columns


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def panels_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> OneDnnBlockedWeight | None:
    return OneDnnBlockedWeight.of(torch.ops.mkldnn._reorder_linear_weight(weight, 160), weight, bias)


def _there() -> bool:
    weight = random(64, 64)
    return can_pack(weight) and panels_of(weight) is not None


needed = pytest.mark.skipif(not _there(), reason="no AVX-512 BF16, or oneDNN lays weights out otherwise")


@needed
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rows", [ROWS, ROWS + 1, 2 * ROWS, 33])
def test_it_is_the_product(size: tuple[int, int], rows: int) -> None:
    weight, bias, x = random(*size), random(size[0], seed=1), random(rows, size[1], seed=2)
    for added in (None, bias):
        found = panels_of(weight, added)
        if found is None:  # oneDNN pads what is no whole number of its blocks
            assert size[1] % 32
            continue
        wanted = F.linear(x.double(), weight.double(), None if added is None else added.double())
        size_ = x.double().abs() @ weight.double().abs().T + 1
        assert ((found.multiply(x).double() - wanted).abs() <= 2**-8 * size_).all()


@needed
def test_a_row_is_the_same_whatever_stands_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, x = panels_of(random(320, 128)), random(21, 128, seed=2)
    assert found is not None
    whole = found.multiply(x)
    assert torch.equal(found.multiply(x[4:13].contiguous()), whole[4:13])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(found.multiply(x), whole)


@needed
def test_another_layout_is_found_out() -> None:
    weight = random(128, 64)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 160)
    assert OneDnnBlockedWeight.of(packed, weight.flip(0), None) is None
    assert OneDnnBlockedWeight.of(packed, random(64, 128), None) is None


@needed
@pytest.mark.parametrize("rows", [1, ROWS, MOST_ROWS + 1])
def test_a_packed_layer_takes_it_for_few_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    linear: Any = torch.nn.Linear(64, 128, dtype=torch.bfloat16)
    weight, taken = linear.weight.detach().clone(), []
    assert pack_weights(torch.nn.ModuleList([linear])) == 1
    assert type(linear) is ReorderedLinear
    multiply = OneDnnBlockedWeight.multiply
    monkeypatch.setattr(OneDnnBlockedWeight, "multiply", lambda self, x: taken.append(len(x)) or multiply(self, x))
    x = random(1, rows, 64, seed=3)
    found, own = linear.rows_product(x), linear(x)
    assert taken == ([rows] if rows == ROWS else [])
    assert torch.equal(own, F.linear(x, weight, linear.bias))
    torch.testing.assert_close(found, own, rtol=2**-7, atol=2**-7)


@needed
def test_machine_code_sees_no_wrong_sizes() -> None:
    found, x = panels_of(random(64, 64)), random(ROWS, 64)
    assert found is not None
    wider = random(64, ROWS)
    for wrong in (x[: ROWS - 1], x[:, :32].contiguous(), x[None], x.float(), wider.T):
        with pytest.raises(ValueError, match="no product"):
            found.multiply(wrong)


def test_without_the_instructions_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_pack(random(64, 64)):
        pytest.skip("no bfloat16 layout here")
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", "avx2 avx512f")
    assert panels_of(random(64, 64)) is None
