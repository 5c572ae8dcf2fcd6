"""How much the question looks at each cached token: one pass of its rows over the reused cache."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.base import Pooling
from kvtool.core.kernels.attention.eager import mean_weights
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.model.attention import Rows
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.probe import ForwardEnded
from kvtool.core.model.prompt_cache import PromptCache

_BLOCK = 64  # rows whose weights exist at a time: memory grows with the prompt's length, not with its square


class _Watch:
    """Sums up the attention of the last rows of a pass, layer by layer; `ends`: the pass with the last one asked."""

    def __init__(self, rows: Rows, count: int, layers: range, length: int, pooling: Pooling, ends: bool) -> None:
        self._rows, self._count = rows, count
        self._layers, self._pooling, self._ends = layers, pooling, ends
        self._total = torch.zeros(length, device=rows.positions.device, dtype=torch.float32)

    @property
    def mean(self) -> torch.Tensor:
        """Over the layers, float32 `[length]`."""
        return self._total / len(self._layers)

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, scoring: AttentionParams) -> None:
        """Add a layer's weights: the mean over heads, then over rows as the pooling says."""
        if layer not in self._layers:
            return
        count = 1 if self._pooling == "last" else self._count
        seen, last = self._rows.seen(scoring.window)[slice(len(self._rows) - count, None)], self._total
        squares = torch.zeros_like(self._total)
        for first in range(0, count, _BLOCK):
            some = slice(first, min(first + _BLOCK, count))
            part = query[0, :, query.shape[2] - count :][:, some]
            weights = mean_weights(part, key[0], seen[some], scoring)
            squares += weights.square().sum(0)
            last = weights[-1]
        pooled = squares.sqrt_()
        self._total += pooled.mul_(last).sqrt_() if self._pooling == "both" else pooled
        if self._ends and layer == self._layers[-1]:
            raise ForwardEnded


def question_attention(
    decoder: Decoder, plan: Plan, cache: PromptCache, loader: Loader, layers: range, pooling: Pooling = "rows"
) -> torch.Tensor:
    """Attention of the question over all that is there, cached rows as they are reused, at their true positions.

    Question and holes are computed, these at every layer; their rows in the cache are those of this pass.

    Parameters
    ----------
    layers : whose attention counts; the mean is taken over them.
    pooling : what a layer's rows become: the L2 norm over all of them (`rows`, InfoFlow KV), the `last` row, which the
        answer begins at, or the geometric mean of the two (`both`).

    Returns
    -------
    float32 `[plan.length]`.
    """
    rows = Rows.of(plan.mask("miss", "fresh").nonzero()[:, 0], decoder.device, plan.turned_to)
    ends = not bool(plan.mask("miss").any())
    watch = _Watch(rows, len(plan.segments[-1].ids), layers, plan.length, pooling, ends)
    cache.before_update = lambda layer, count: loader.wait(layer)
    ids = plan.ids
    with suppress(ForwardEnded):
        at = plan.positions[rows.order].to(decoder.device) if plan.dropped else None
        decoder.walk([ids[place] for place in rows.order], replace(rows, watch=watch), cache, at)
    cache.before_update = None
    return watch.mean.cpu()
