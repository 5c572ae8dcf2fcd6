"""Attention weights as numbers: what no kernel keeps."""

from __future__ import annotations

import torch

_SCORE_BYTES = 2 * 2**20  # so many scores at a time stay in the cache


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


def mean_weights(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """The mean over all heads of :func:`attention_weights`, float32 `[rows, keys]`.

    On a CPU in blocks of scores that stay in the cache, the rows of one head of keys at a time: at 32,000 keys a third
    of the time. Only the last keys, which not every row sees, are masked.
    """
    if query.device.type != "cpu":
        return attention_weights(query, key, positions, scaling).mean(0)
    heads, rows, head_dim = query.shape
    kv_heads, keys, _ = key.shape
    group, scale = heads // kv_heads, head_dim**-0.5 if scaling is None else scaling
    first = int(positions[0]) + 1
    hidden = torch.arange(first, keys) > positions[:, None]
    total = torch.zeros((rows, keys), dtype=torch.float32)
    step = max(1, _SCORE_BYTES // (total.itemsize * group * keys))
    for begin in range(0, rows, step):
        some = slice(begin, min(begin + step, rows))
        for head, own in enumerate(key):
            part = query[head * group : (head + 1) * group, some].reshape(-1, head_dim)
            scores = (part @ own.T).float().mul_(scale).view(group, -1, keys)
            scores[:, :, first:].masked_fill_(hidden[some], -torch.inf)
            total[some] += scores.softmax(-1).sum(0)
    return total.div_(heads)
