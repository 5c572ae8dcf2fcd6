"""Attention weights as numbers: what no kernel keeps."""

from __future__ import annotations

import torch


def attention_weights(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Compute the attention weights of some rows, float32 `[heads, rows, keys]`, all in memory at once.

    Parameters
    ----------
    query : rotated, `[heads, rows, head_dim]`.
    key : rotated, `[kv_heads, keys, head_dim]`; a head's own is that of its group.
    positions : `[rows]`; a row sees the keys up to its own.
    scaling : None: 1 / √head_dim.
    """
    heads, rows, head_dim = query.shape
    kv_heads, keys, _ = key.shape
    scores = (query.reshape(kv_heads, -1, head_dim) @ key.transpose(1, 2)).float().view(heads, rows, keys)
    scores *= head_dim**-0.5 if scaling is None else scaling
    hidden = torch.arange(keys, device=key.device) > positions[:, None]
    return scores.masked_fill_(hidden, -torch.inf).softmax(-1)
