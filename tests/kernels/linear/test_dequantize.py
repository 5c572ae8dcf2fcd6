"""Unpacked weights are, bit for bit, the numbers that packed ones stand for, rounded to bfloat16."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kvtool.core.kernels.linear.gemm_ir import unpack
from kvtool.core.kernels.linear.qtensor import LAYOUTS, none, packed_codes, take_rows
from kvtool.core.native.builder import module
from kvtool.core.native.isa import ISAS, runnable
from kvtool.core.native.jit import compiled
from tests.kernels.linear.matrices import random_matrix
from tests.kernels.linear.reference import dequantize, unpacked_codes

PACKED = [kind for kind, layout in LAYOUTS.items() if not layout.dense]


@pytest.mark.some(10)
@pytest.mark.parametrize("isa", runnable())
@pytest.mark.parametrize("to", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", PACKED)
def test_native_code_unpacks_to_the_same_bits(isa: str, kind: str, to: str) -> None:
    (function,) = compiled(module(unpack(ISAS[isa], kind, to)), ISAS[isa], f"unpack_{kind}_{to}")
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3)(function.address)
    for rows, columns in [(5, 256), (4, 768)] if LAYOUTS[kind].superblocks else [(5, 32), (4, 288), (5, 768)]:
        matrix = random_matrix(kind, rows, columns)
        out = torch.full((rows, columns), 7.0, dtype=getattr(torch, to))
        pointers = [tensor.data_ptr() for tensor in (matrix.data, matrix.scales, matrix.group_mins, out)]
        call(*pointers, 1, rows - 1, columns)
        call(*pointers, 2, 2, columns)
        wanted = dequantize(matrix).bfloat16()[1 : rows - 1].to(out.dtype)
        assert torch.equal(out[1 : rows - 1], wanted)
        assert (out[[0, rows - 1]] == 7.0).all()


@pytest.mark.parametrize("kind", PACKED)
def test_codes_are_packed_and_unpacked(kind: str) -> None:
    matrix = random_matrix(kind, 3, 512)
    codes = unpacked_codes(matrix)
    assert torch.equal(packed_codes(codes, matrix.layout.bits), matrix.data)
    assert int(codes.max()) == (127 if matrix.layout.bits == 8 else 2**matrix.layout.bits - 1)


def test_rows_can_be_taken() -> None:
    for kind in LAYOUTS:
        matrix = random_matrix(kind, 6, 512)
        order = torch.tensor([4, 0, 0, 5])
        assert torch.equal(dequantize(take_rows(matrix, order)), dequantize(matrix)[order])
    assert none().numel() == 0
