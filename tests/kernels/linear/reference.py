"""Packed weights unpacked by torch, which machine code is compared with."""

from __future__ import annotations

import torch

from kvtool.core.kernels.linear.qtensor import BLOCK, QuantizedTensor


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
