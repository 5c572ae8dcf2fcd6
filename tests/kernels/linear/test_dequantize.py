"""Unpacked weights are, bit for bit, the numbers that packed ones stand for, and that gguf's own reference gives."""

from __future__ import annotations

import ctypes
import io

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvtool.core.kernels.linear.gemm_ir import unpack
from kvtool.core.kernels.linear.qtensor import LAYOUTS, READERS, QuantizedTensor, none, read_blocks, take_rows
from kvtool.core.native.builder import module
from kvtool.core.native.isa import ISAS, runnable
from kvtool.core.native.jit import compiled
from tests.kernels.linear.matrices import COLUMNS, HALVES, ROWS, dequantize, random_blocks, random_matrix
from tests.wording import refused

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


def test_rows_can_be_taken() -> None:
    for kind in LAYOUTS:
        matrix = random_matrix(kind, 6, 512)
        order = torch.tensor([4, 0, 0, 5])
        assert torch.equal(dequantize(take_rows(matrix, order)), dequantize(matrix)[order])
    assert none().numel() == 0


def test_every_packed_kind_is_read() -> None:
    assert set(READERS) == {kind for kind, layout in LAYOUTS.items() if not layout.dense}
    for kind, block in READERS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]][1] == block.itemsize


def read(kind: str, data: bytes, nbytes: int | None = None) -> QuantizedTensor:
    return read_blocks(kind, io.BytesIO(data), nbytes or len(data), ROWS, COLUMNS)


@pytest.mark.parametrize("kind", READERS)
def test_numbers_are_those_of_the_reference(kind: str) -> None:
    blocks = random_blocks(kind)
    matrix = read(kind, blocks.tobytes())
    wanted = gguf.quants.dequantize(blocks, GGMLQuantizationType[kind.upper()]).reshape(ROWS, COLUMNS)
    assert torch.equal(dequantize(matrix), torch.from_numpy(wanted))
    assert matrix.nbytes <= 1.2 * blocks.nbytes


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_no_numbers_are_refused(kind: str, bad: float) -> None:
    for start in HALVES[kind]:
        blocks = random_blocks(kind)
        blocks[-1, start : start + 2] = np.array([bad], np.float16).view(np.uint8)
        with refused(ValueError):
            read(kind, blocks.tobytes())


@pytest.mark.parametrize("kind", READERS)
def test_wrong_sizes_are_refused(kind: str) -> None:
    data = random_blocks(kind).tobytes()
    for cut in (data[:-1], data[: -READERS[kind].itemsize], data + data):
        with refused(ValueError):
            read(kind, cut)
    with refused(ValueError):
        read(kind, data[:-1], len(data))
