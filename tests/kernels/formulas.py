"""Formulas that machine code is compared with, in torch's plain operations, and random numbers for both."""

from __future__ import annotations

import math

import torch

from kvtool.core.kernels.attention.params import AttentionParams


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate by halves, as `transformers` does, in the dtype of the heads; numbers beyond the tables' width stay."""
    part = heads[..., : cos.shape[-1]]
    low, high = part.chunk(2, -1)
    turned = part * cos + torch.cat([-high, low], -1) * sin
    return torch.cat([turned, heads[..., cos.shape[-1] :]], -1)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams, limits: torch.Tensor
) -> torch.Tensor:
    """softmax(QKᵀ · scale, capped, of the keys in a row's window, with sinks) V, float64 `[…, heads, rows, value_dim]`.

    `limits`: the last key that each row sees.
    """
    key, value = (side.double().repeat_interleave(query.shape[-3] // side.shape[-3], -3) for side in (key, value))
    scores = query.double() @ key.mT * params.scale
    if params.softcap is not None:
        scores = params.softcap * (scores / params.softcap).tanh()
    distance = limits[:, None] - torch.arange(key.shape[-2])
    hidden = (distance < 0) | (distance >= (params.window or math.inf))
    powers = scores.masked_fill(hidden, -math.inf).exp()
    sinks = torch.zeros(1) if params.sinks is None else params.sinks.double().exp()
    return powers @ value / (powers.sum(-1, keepdim=True) + sinks[:, None, None])
