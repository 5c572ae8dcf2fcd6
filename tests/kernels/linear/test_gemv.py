"""The products of packed weights are those of the numbers they stand for, on every instruction set and at odd sizes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import product as product_of

import pytest
import torch

from kvtool.core.kernels.linear.gemm_ir import product
from kvtool.core.kernels.linear.qtensor import LAYOUTS, QuantizedTensor
from kvtool.core.native.builder import module
from kvtool.core.native.isa import ISAS, runnable
from kvtool.core.native.jit import compiled
from tests.kernels.linear.matrices import dequantize, random_matrix
from tests.wording import refused

Product = Callable[..., None]
SIZES = [(1, 32), (3, 64), (5, 256), (9, 288), (2, 576), (4, 1536)]


def native(isa: str, kind: str, height: int = 1) -> Product:
    function = product(ISAS[isa], kind, height)
    (compiled_,) = compiled(module(function), ISAS[isa], function.name)
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5, *[ctypes.c_int64] * (3 if height == 1 else 6))(
        compiled_.address
    )


def run(call: Product, matrix: QuantizedTensor, x: torch.Tensor, y: torch.Tensor, first: int, last: int) -> None:
    pointers = [tensor.data_ptr() for tensor in (matrix.data, matrix.scales, matrix.group_mins, x, y)]
    call(*pointers, first, last, matrix.columns)


def sizes(kind: str) -> list[tuple[int, int]]:
    fit = [(rows, columns) for rows, columns in SIZES if columns % LAYOUTS[kind].multiple == 0]
    return [*fit, (3, 1), (2, 7), (5, 67), (3, 131)] if LAYOUTS[kind].dense else fit


@pytest.mark.some(6)
@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("kind", LAYOUTS)
def test_it_is_the_product_of_the_numbers(isa: str, kind: str) -> None:
    call = native(isa, kind)
    for rows, columns in sizes(kind):
        matrix, x = random_matrix(kind, rows, columns), torch.randn(columns)
        y = torch.full((rows + 1,), 7.0)
        run(call, matrix, x, y, 0, rows)
        weights = dequantize(matrix).double()
        bound = 1e-6 * (weights.abs() @ x.double().abs())
        assert ((y[:-1] - weights @ x.double()).abs() <= bound).all(), (rows, columns)
        assert y[-1] == 7.0


@pytest.mark.some(6)
@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("kind", LAYOUTS)
def test_rows_are_apart(isa: str, kind: str) -> None:
    call, matrix, x = native(isa, kind), random_matrix(kind, 9, 768), torch.randn(768)
    whole, parts = torch.zeros(9), torch.full((9,), 7.0)
    run(call, matrix, x, whole, 0, 9)
    run(call, matrix, x, parts, 2, 5)
    run(call, matrix, x, parts, 4, 4)
    assert torch.equal(parts[2:5], whole[2:5])
    assert (parts[[0, 1, 5, 6, 7, 8]] == 7.0).all()


@pytest.mark.some(6)
@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("kind", LAYOUTS)
def test_several_at_a_time_are_each_as_alone(isa: str, kind: str) -> None:
    alone = native(isa, kind)
    for height in (2, 3, 4):
        together = native(isa, kind, height)
        several_blocks = [(400, 1536)] if height == 4 else []
        for (rows, columns), count in product_of(sizes(kind) + several_blocks, (height, height + 1, 2 * height + 1)):
            matrix, x = random_matrix(kind, rows, columns), torch.randn(count, columns + 5)
            one, many = torch.full((2, count, rows + 3), 7.0)
            for number in range(count):
                run(alone, matrix, x[number], one[number], 0, rows)
            pointers = [tensor.data_ptr() for tensor in (matrix.data, matrix.scales, matrix.group_mins, x, many)]
            together(*pointers, 0, rows, columns, count, columns + 5, rows + 3)
            assert torch.equal(one, many), (height, count, rows, columns)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_does_not_fit_is_refused(kind: str) -> None:
    good = random_matrix(kind, 4, 512)
    wrong = [
        {"rows": 5},
        {"rows": 0},
        {"columns": 513},
        {"columns": 1024},
        {"data": good.data[:3]},
        {"data": good.data.double()},
        {"data": torch.cat([good.data, good.data], 1)[:, : good.data.shape[1]]},
        {"scales": torch.zeros(3, 2).half()},
        {"group_mins": torch.zeros(4, 3).half()},
    ]
    fields = {name: getattr(good, name) for name in ("kind", "rows", "columns", "data", "scales", "group_mins")}
    for change in wrong:
        with refused(ValueError):
            QuantizedTensor(**{**fields, **change})
