"""The question's own pass, for modes that rank rows by its attention: over the cache as it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from kvtool.core.fusion.cost import MOST_ASKING
from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.base import Pooling
from kvtool.core.kernels.attention.eager import mean_weights
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.passes import OnLayer
from kvtool.core.model.prompt_cache import PromptCache

if TYPE_CHECKING:
    from kvtool.core.model.captured import StaticRows
    from kvtool.core.model.decoder import Decoder

_BLOCK = 64  # rows whose weights exist at a time: memory grows with the prompt's length, not with its square

# Of tokens, their rows, how many of these are asked, layers, pooling, and whether the pass ends with the layers.
GraphAttention = Callable[[list[int], QueryRows, int, range, Pooling, bool], torch.Tensor | None]


class QuestionWatch(OnLayer):
    """Sum of the attention of a pass's last `count` rows. `ends`: the pass ends with the last of `layers`. `counted`:
    float32 `[count]`, 1 for those of them that count, 0 for others before them; None: all count."""

    def __init__(
        self,
        rows: QueryRows | StaticRows,
        count: int,
        layers: range,
        length: int,
        pooling: Pooling,
        ends: bool,
        counted: torch.Tensor | None = None,
        wait: Callable[[int], None] = lambda layer: None,
    ) -> None:
        self._wait = wait
        self._rows, self._count, self._counted = rows, count, counted
        self._layers, self._pooling, self._ends = layers, pooling, ends
        self._total = torch.zeros(length, device=rows.places.device, dtype=torch.float32)

    @property
    def mean(self) -> torch.Tensor:
        return self._total / len(self._layers)

    def before_write(self, layer: int, rows: int) -> None:
        self._wait(layer)

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> bool:
        if layer not in self._layers:
            return False
        count = 1 if self._pooling == "last" else self._count
        seen, last = self._rows.seen(params.window)[slice(len(self._rows) - count, None)], self._total
        squares = torch.zeros_like(self._total)
        for first in range(0, count, _BLOCK):
            block = slice(first, min(first + _BLOCK, count))
            part = query[0, :, query.shape[2] - count :][:, block]
            weights = mean_weights(part, keys[0, :, : len(self._total)], seen[block], params)
            shares = weights if self._counted is None else weights * self._counted[block, None]
            squares += shares.square().sum(0)
            last = weights[-1]
        pooled = squares.sqrt_()
        self._total += pooled.mul_(last).sqrt_() if self._pooling == "both" else pooled
        return self._ends and layer == self._layers[-1]


def question_attention(
    decoder: Decoder,
    plan: Plan,
    cache: PromptCache,
    loader: Loader,
    layers: range,
    pooling: Pooling = "rows",
    by_graph: GraphAttention | None = None,
) -> torch.Tensor:
    """Measure the question's attention to the whole prompt, over reused rows at their true positions: float32
    `[plan.length]`, the mean over `layers`. Of a question longer than `MOST_ASKING` tokens only the end is computed;
    places after it are 0. `pooling` of rows: L2 norm (`rows`, InfoFlow KV), the `last` row, which predicts the answer's
    first token, or the geometric mean of `both`. `by_graph`: computes the same where nothing is to be loaded."""
    length, plan = plan.length, plan.with_question_end(MOST_ASKING)
    rows = QueryRows.of(plan.mask("miss", "fresh").nonzero()[:, 0], decoder.device, plan.position_ids)
    ends = not bool(plan.mask("miss").any())
    count, ids = len(plan.segments[-1].ids), plan.ids
    tokens = [ids[row] for row in rows.order]
    mean = None if by_graph is None else by_graph(tokens, rows, count, layers, pooling, ends)
    if mean is None:
        wait = partial(loader.wait, meanwhile=decoder.pause)
        watch = QuestionWatch(rows, count, layers, plan.length, pooling, ends, wait=wait)
        at = plan.positions[rows.order].to(decoder.device) if plan.dropped else None
        decoder.fill_cache(tokens, rows, cache, at, watch)
        mean = watch.mean
    return pad(mean.cpu()[: plan.length], (0, length - plan.length))
