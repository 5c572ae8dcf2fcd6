"""Packed matrices of random bits: every code, scale and min that a file could hold; and what torch unpacks of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kvtool.core.kernels.linear.qtensor import BLOCK, LAYOUTS, Layout, QuantizedTensor, dense, none


def random_matrix(kind: str, rows: int, columns: int, seed: int = 0) -> QuantizedTensor:
    """A matrix of one of LAYOUTS whose weights are of the size of a model's."""
    chance = torch.Generator().manual_seed(seed)
    layout = LAYOUTS[kind]
    if layout.dense:
        return dense(torch.randn(rows, columns, generator=chance).to(getattr(torch, kind)))
    data = torch.randint(0, 256, (rows, layout.row_bytes(columns)), dtype=torch.uint8, generator=chance)
    if layout.superblocks:
        return QuantizedTensor(kind, rows, columns, data, _blocks(layout, rows, columns, chance), none())
    scales, group_mins = torch.randn(2, rows, columns // layout.group, generator=chance).mul(0.02).half()
    scales[0, 0], group_mins[-1, -1] = 6e-8, -6e-5  # below float16's normal numbers
    return QuantizedTensor(kind, rows, columns, data, scales, group_mins if layout.group_mins else none())


def _blocks(layout: Layout, rows: int, columns: int, chance: torch.Generator) -> torch.Tensor:
    kinds, blocks = 1 + layout.group_mins, rows * columns // 256
    whole = torch.randn(blocks, kinds, generator=chance).mul(0.001).half().view(torch.uint8)
    size = layout.block_bytes - 2 * kinds
    each = torch.randint(-128, 128, (blocks, size), dtype=torch.int8, generator=chance).view(torch.uint8)
    return torch.cat([whole, each], 1).view(rows, -1)


def dequantize(matrix: QuantizedTensor) -> torch.Tensor:
    layout = matrix.layout
    if layout.dense:
        return matrix.data.float()
    codes = (unpacked_codes(matrix).float() - layout.zero_point).view(matrix.rows, -1, layout.group)
    scales, group_mins = _factors(matrix)
    weights = codes * scales[:, :, None]
    if group_mins is not None:
        weights += group_mins[:, :, None]
    return weights.view(matrix.rows, matrix.columns)


def _factors(matrix: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    layout = matrix.layout
    if not layout.superblocks:
        return matrix.scales.float(), matrix.group_mins.float() if layout.group_mins else None
    kinds = 1 + layout.group_mins
    blocks = matrix.scales.view(-1, layout.block_bytes)
    whole = blocks[:, : 2 * kinds].contiguous().view(torch.float16).float()
    each = blocks[:, 2 * kinds :].contiguous().view(torch.int8).float().view(len(blocks), kinds, -1)
    products = (whole[:, :, None] * each).view(matrix.rows, -1, kinds, each.shape[-1])
    scales, *group_mins = (products[:, :, kind].reshape(matrix.rows, -1) for kind in range(kinds))
    return scales, -group_mins[0] if group_mins else None


def unpacked_codes(matrix: QuantizedTensor) -> torch.Tensor:
    layout = matrix.layout
    if layout.bits == 8:
        return matrix.data.view(torch.int8)
    spans, first, done = matrix.data.view(-1, 4 * layout.bits), 0, 0
    codes = torch.zeros(len(spans), BLOCK, dtype=torch.uint8)
    for width in layout.planes:
        codes |= _bit_fields(spans[:, first : first + 4 * width], width) << done
        first, done = first + 4 * width, done + width
    return codes.view(matrix.rows, matrix.columns)


def _bit_fields(bytes_: torch.Tensor, width: int) -> torch.Tensor:
    """Return codes of `width` bits: of each run of bytes first all lowest, then the next."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    run = 1 if width == 1 else 4 * width
    fields: torch.Tensor = (bytes_.reshape(len(bytes_), -1, 1, run) >> shifts) & (2**width - 1)
    return fields.flatten(1)


# Where a block has its float16 numbers.
HALVES = {"q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2)}
HALVES |= {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
ROWS, COLUMNS = 3, 512


def random_blocks(kind: str) -> npt.NDArray[np.uint8]:
    """The blocks of a tensor `[ROWS, COLUMNS]`, its scales and group_mins of the usual size."""
    chance = np.random.default_rng(0)
    size, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    blocks = chance.integers(0, 256, (ROWS * COLUMNS // size, width), dtype=np.uint8)
    for start in HALVES[kind]:
        halves = chance.normal(0, 0.01, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = halves[:, None].view(np.uint8)
    return blocks
