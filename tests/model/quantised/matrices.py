"""Matrices of random bits, for tests: every code, scale and min that a file could hold."""

from __future__ import annotations

import torch

from kvtool.core.model.quantised.matrix import LAYOUTS, Matrix, dense, none


def random_matrix(kind: str, rows: int, columns: int, seed: int = 0) -> Matrix:
    """A matrix of one of LAYOUTS whose weights are of the size of a model's."""
    chance = torch.Generator().manual_seed(seed)
    layout = LAYOUTS[kind]
    if layout.dense:
        return dense(torch.randn(rows, columns, generator=chance).to(getattr(torch, kind)))
    data = torch.randint(0, 256, (rows, layout.row_bytes(columns)), dtype=torch.uint8, generator=chance)
    scales, mins = torch.randn(2, rows, layout.groups(columns), generator=chance).mul(0.02).half()
    scales[0, 0], mins[-1, -1] = 6e-8, -6e-5  # below float16's normal numbers
    return Matrix(kind, rows, columns, data, scales, mins if layout.mins else none())
