"""Attention weights as numbers: what no kernel keeps."""

from __future__ import annotations

import torch

from kvtool.core.kernels.attention.params import Scoring, Seen

_SCORE_BYTES = 2 * 2**20  # so many scores at a time stay in the cache


def attention_weights(query: torch.Tensor, key: torch.Tensor, seen: Seen, scoring: Scoring) -> torch.Tensor:
    """Compute the attention weights of some rows, float32 `[heads, rows, keys]`, all in memory at once.

    What a sink takes is no key's: with sinks, a row's weights sum up to less than 1.

    Parameters
    ----------
    query : rotated, `[heads, rows, head_dim]`.
    key : rotated, `[kv_heads, keys, head_dim]`; a head's own is that of its group.
    """
    heads, rows, head_dim = query.shape
    kv_heads, keys, _ = key.shape
    scores = (query.reshape(kv_heads, -1, head_dim) @ key.transpose(1, 2)).float().view(heads, rows, keys)
    scores = _shaped(scores, scoring).masked_fill_(seen.hidden(slice(None), 0, keys), -torch.inf)
    return _softmax(scores, scoring.sinks)


def _shaped(scores: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """From products to scores, float32, in place but for the last step: a gradient needs what comes out of tanh."""
    scores *= scoring.scale
    if scoring.softcap is None:
        return scores
    return scores.div_(scoring.softcap).tanh_() * scoring.softcap


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of `[heads, rows, keys]` with each head's sink beside its keys."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


def mean_weights(query: torch.Tensor, key: torch.Tensor, seen: Seen, scoring: Scoring) -> torch.Tensor:
    """The mean over all heads of :func:`attention_weights`, float32 `[rows, keys]`.

    On a CPU in blocks of scores that stay in the cache, the rows of one head of keys at a time: at 32,000 keys a third
    of the time. Only keys that not every row sees are masked.
    """
    if query.device.type != "cpu":
        return attention_weights(query, key, seen, scoring).mean(0)
    heads, rows, head_dim = query.shape
    kv_heads, keys, _ = key.shape
    group, begin = heads // kv_heads, seen.begin(0)
    total = torch.zeros((rows, keys), dtype=torch.float32)
    step = max(1, _SCORE_BYTES // (total.itemsize * group * (keys - begin)))
    for start in range(0, rows, step):
        some = slice(start, min(start + step, rows))
        hidden = _Hidden(seen, some, begin, keys)
        for head, own in enumerate(key):
            of_group = slice(head * group, (head + 1) * group)
            part = query[of_group, some].reshape(-1, head_dim)
            scores = _shaped((part @ own[begin:].T).float().view(group, -1, keys - begin), scoring)
            hidden.hide(scores)
            total[some, begin:] += _softmax(scores, None if scoring.sinks is None else scoring.sinks[of_group]).sum(0)
    return total.div_(heads)


class _Hidden:
    """Masks scores `[heads, rows, keys]` of some rows over the keys `begin` … `keys`, where a row does not see all."""

    def __init__(self, seen: Seen, rows: slice, begin: int, keys: int) -> None:
        first = begin if seen.first is not None else min(seen.last[rows.start] + 1, keys)
        self._from = first - begin
        self._mask = seen.hidden(rows, first, keys)

    def hide(self, scores: torch.Tensor) -> None:
        scores[:, :, self._from :].masked_fill_(self._mask, -torch.inf)


def attend_by_weights(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring, seen: Seen
) -> torch.Tensor:
    """Attend by weights, block by block of rows, whatever the scoring is.

    Scores are float32 on every device: the cap bends those of which the difference counts.

    Parameters
    ----------
    query : `[1, heads, rows, head_dim]`.
    key, value : `[1, kv_heads, keys, head_dim]`.

    Returns
    -------
    `[1, heads, rows, head_dim]`, laid out with rows before heads: the model's own transposition then copies nothing.
    """
    _, heads, rows, _ = query.shape
    kv_heads = key.shape[1]
    out = query.new_empty((rows, heads, value.shape[3])).transpose(0, 1)
    start = 0
    while start < rows:
        begin = seen.begin(start)
        most = max(1, _SCORE_BYTES // (4 * heads * (seen.last[start] + 1 - begin)))
        some = slice(start, min(start + most, rows))
        keys = slice(begin, seen.last[some.stop - 1] + 1)
        own = seen[some]
        hidden = own.hidden(slice(None), keys.start, keys.stop)
        wide = query[0, :, some].float().reshape(kv_heads, -1, query.shape[3])
        scores = torch.bmm(wide, key[0, :, keys].float().transpose(1, 2)).view(heads, -1, keys.stop - begin)
        weights = _softmax(_shaped(scores, scoring).masked_fill_(hidden, -torch.inf), scoring.sinks)
        mixed = torch.bmm(weights.to(value.dtype).view(kv_heads, -1, keys.stop - begin), value[0, :, keys])
        out[:, some] = mixed.view(heads, some.stop - start, -1)
        start = some.stop
    return out[None]
