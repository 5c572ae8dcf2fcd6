"""Products of few rows with packed weights are those of the numbers they stand for, on every instruction set."""

from __future__ import annotations

import pytest
import torch

from kvtool.core.kernels.linear import modules
from kvtool.core.kernels.linear import quantized as native
from kvtool.core.kernels.linear.modules import PackedLinear
from kvtool.core.kernels.linear.qtensor import LAYOUTS, QuantizedTensor
from kvtool.core.kernels.linear.quantized import least_rows, small_batch_gemm
from kvtool.core.native.isa import ISAS, Isa, runnable
from tests.kernels.formulas import random
from tests.kernels.linear.matrices import dequantize, random_matrix
from tests.spying import calls_of
from tests.wording import refused

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # of a result, by the sum of what it is the sum of
SIZES = [(4, 256, 4), (20, 768, 7), (36, 512, 33), (8, 288, 6), (12, 32, 5)]  # of W, and rows of X


def cases() -> list[tuple[Isa, str, torch.dtype]]:
    return [
        (isa, kind, dtype)
        for isa in (ISAS[name] for name in runnable())
        for kind in LAYOUTS
        for dtype in ROUNDING
        if least_rows(random_matrix(kind, 4, 256), dtype, isa) is not None
    ]


def weights(matrix: QuantizedTensor) -> torch.Tensor:
    return (dequantize(matrix) if matrix.layout.dense else dequantize(matrix).bfloat16()).double()


def close(found: torch.Tensor, x: torch.Tensor, matrix: QuantizedTensor, bias: torch.Tensor | None = None) -> None:
    wanted, size = x.double() @ weights(matrix).T, x.double().abs() @ weights(matrix).abs().T
    if bias is not None:
        wanted, size = wanted + bias.double(), size + bias.double().abs()
    assert ((found.double() - wanted).abs() <= ROUNDING[x.dtype] * size).all()


@pytest.mark.some(5)
@pytest.mark.parametrize(("isa", "kind", "dtype"), cases(), ids=str)
def test_it_is_the_product_of_the_numbers(isa: Isa, kind: str, dtype: torch.dtype) -> None:
    for outputs, columns, rows in SIZES:
        if columns % LAYOUTS[kind].multiple == 0:
            matrix, x = random_matrix(kind, outputs, columns), random(rows, columns, dtype=dtype)
            bias = random(outputs, dtype=dtype, seed=1)
            close(small_batch_gemm(matrix, x, isa=isa), x, matrix)
            close(small_batch_gemm(matrix, x, bias, isa), x, matrix, bias)


@pytest.mark.parametrize(("isa", "dtype"), sorted({(isa, dtype) for isa, _, dtype in cases()}, key=str), ids=str)
def test_a_row_is_the_same_whatever_stands_beside_it(
    isa: Isa, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, x = random_matrix("q4_1", 40, 576), random(23, 576, dtype=dtype)
    whole = small_batch_gemm(matrix, x, isa=isa)
    assert torch.equal(small_batch_gemm(matrix, x[5:12].contiguous(), isa=isa), whole[5:12])
    blocks = calls_of(monkeypatch, native, "_multiply_block", lambda function, matrix, x, *rest: len(x))
    monkeypatch.setattr(native, "_FEW", 9)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(small_batch_gemm(matrix, x, isa=isa), whole)
    assert blocks == [7, 8, 8]


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_linear_layer_takes_it_for_as_many_rows_as_it_pays(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, bias = random_matrix("q4_k", 12, 256), random(12, dtype=dtype)
    layer = PackedLinear(matrix, bias, dtype)
    taken = calls_of(monkeypatch, modules, "small_batch_gemm", lambda matrix, x, *rest: len(x))
    for rows in (1, 8, 257):
        x = random(1, rows, 256, dtype=dtype)
        found = layer.rows_product(x)
        assert found.shape == (1, rows, 12)
        assert layer.in_team(rows, dtype) == (rows in taken)
        if rows > 1:  # one row is multiplied with weights that are not rounded
            close(found[0], x[0], matrix, bias)
    expected = [8] if dtype == torch.bfloat16 else [8, 257]
    assert taken == (expected if least_rows(matrix, dtype) is not None else [])


def test_machine_code_sees_no_wrong_sizes() -> None:
    isa, matrix, x = ISAS[runnable()[0]], random_matrix("q8_0", 8, 64), torch.randn(8, 64)
    for wrong in (
        (matrix, x[:, :32].contiguous()),
        (matrix, x[None]),
        (matrix, x.T.contiguous().T),
        (matrix, x.double()),
        (matrix, x[:1]),
        (matrix, x, torch.zeros(7)),
        (random_matrix("q8_0", 7, 64), x),
        (random_matrix("bfloat16", 8, 64), x),
        (random_matrix("float32", 8, 60), torch.randn(8, 60)),
    ):
        with refused(ValueError):
            small_batch_gemm(*wrong, isa=isa)


@pytest.mark.parametrize("count", [9, 57, 65, 73])
def test_no_block_has_fewer_rows_than_the_code_takes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Blocks of as many rows as fit would leave one row over, and the code reads whole tiles."""
    monkeypatch.setattr(native, "_FEW", 8)
    matrix, x = random_matrix("q8_0", 40, 576), random(count, 576, dtype=torch.float32)
    least = least_rows(matrix, x.dtype)
    if least is None:
        pytest.skip("no code here")
    sizes = calls_of(monkeypatch, native, "_multiply_block", lambda function, matrix, x, *rest: len(x))
    close(small_batch_gemm(matrix, x), x, matrix)
    assert min(sizes) >= least
    assert sum(sizes) == count
