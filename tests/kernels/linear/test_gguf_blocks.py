"""Every kind of GGUF block is read to the numbers that gguf's own reference gives."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvtool.core.kernels.linear.qtensor import LAYOUTS, READERS, tensor_of_blocks
from tests.kernels.linear.blocks import COLUMNS, HALVES, ROWS, random_blocks
from tests.kernels.linear.reference import dequantize


def test_every_packed_kind_is_read() -> None:
    assert set(READERS) == {kind for kind, layout in LAYOUTS.items() if not layout.dense}
    for kind, (width, _) in READERS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]][1] == width


@pytest.mark.parametrize("kind", READERS)
def test_numbers_are_those_of_the_reference(kind: str) -> None:
    blocks = random_blocks(kind)
    matrix = tensor_of_blocks(kind, torch.from_numpy(blocks).view(-1), ROWS, COLUMNS)
    wanted = gguf.quants.dequantize(blocks, GGMLQuantizationType[kind.upper()]).reshape(ROWS, COLUMNS)
    assert torch.equal(dequantize(matrix), torch.from_numpy(wanted))
    assert matrix.nbytes <= 1.2 * blocks.nbytes


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_no_numbers_are_refused(kind: str, bad: float) -> None:
    for start in HALVES[kind]:
        blocks = random_blocks(kind)
        blocks[-1, start : start + 2] = np.array([bad], np.float16).view(np.uint8)
        with pytest.raises(ValueError, match="finite"):
            tensor_of_blocks(kind, torch.from_numpy(blocks).view(-1), ROWS, COLUMNS)


@pytest.mark.parametrize("kind", READERS)
def test_wrong_sizes_are_refused(kind: str) -> None:
    data = torch.from_numpy(random_blocks(kind)).view(-1)
    for cut in (data[:-1], data[: -READERS[kind][0]], torch.cat([data, data])):
        with pytest.raises((ValueError, RuntimeError)):
            tensor_of_blocks(kind, cut, ROWS, COLUMNS)
