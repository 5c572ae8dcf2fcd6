"""Matrices of random bits, for tests: every code, scale and min that a file could hold."""

from __future__ import annotations

import torch

from kvtool.core.kernels.linear.qtensor import LAYOUTS, Layout, QuantizedTensor, dense, none


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
