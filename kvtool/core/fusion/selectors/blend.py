"""CacheBlend (arXiv 2405.16444): selectively recompute the tokens whose KV deviates most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.plan import Cost, Plan, PromptRows
from kvtool.core.fusion.selectors.base import Selector, share_of
from kvtool.core.options.option import option

Metric = Literal["v_sse", "k_sse", "kv_sse", "k_l1"]


@dataclass(frozen=True, slots=True)
class Blend(Selector):
    """Recompute the ratio `ratio` of the context tokens with the highest KV deviation, ⌈ratio · N⌉ rows (HKVD tokens,
    section 4), of which `v_sse` is the authors' metric.

    Layers before `check_layer` run over all context rows (at layer 0 nothing deviates); there the deviation between
    recomputed and reused KV is measured and `gradual` × ratio of the rows stay, shrinking linearly to `ratio` over the
    next `filter_layers` layers, each time by the deviation at that layer (section 4.3; the paper gives no schedule).
    """

    name: ClassVar[str] = "blend"
    ignores_question: ClassVar[bool] = True
    knob: ClassVar[str] = "ratio"
    reason: ClassVar[str] = "deviation"
    ratio: float = 0.15
    check_layer: int = option(1, "The first layer at which rows are ranked by their deviation.", lowest=0)
    metric: Metric = option("v_sse", "The deviation: squared error of V, K or both, or absolute error of K.")
    gradual: float = option(1.5, "Rows kept at `check_layer`, as a multiple of the ratio.", lowest=1)
    filter_layers: int = option(3, "Layers over which the rows shrink to the ratio.", lowest=0)
    shift: bool = True

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        return plan.hit_rows() if self.ratio > 0 else plan.mask()

    def cost(self, prompt: PromptRows) -> Cost:
        narrowed = self._narrowed(prompt.context, prompt.layers)
        entering, total = prompt.hits if narrowed else 0, 0
        for layer in range(prompt.layers):
            total += entering
            entering = min(narrowed.get(layer, entering), prompt.hits)
        return Cost(overlapped=total / prompt.layers)

    def narrowing(self, plan: Plan, layers: int) -> dict[int, int]:
        return self._narrowed(plan.context_tokens, layers)

    def _narrowed(self, context: int, layers: int) -> dict[int, int]:
        if self.ratio == 0 or not context:
            return {}
        check = min(self.check_layer, layers - 1)
        last = min(check + self.filter_layers, layers - 1)
        shares = {last: self.ratio}
        for layer in range(check, last):
            left = (last - layer) / (last - check)
            shares[layer] = min(1.0, self.ratio * (1 + (self.gradual - 1) * left))
        return {layer: share_of(share, context) for layer, share in shares.items()}

    def worth(self, new: LayerKV, old: LayerKV) -> torch.Tensor:
        if self.metric == "k_l1":
            return (new[0].float() - old[0].float()).abs().sum((0, 1, 3))
        sides = {"v_sse": [1], "k_sse": [0], "kv_sse": [0, 1]}[self.metric]
        squares = [(new[side].float() - old[side].float()).square().sum((0, 1, 3)) for side in sides]
        return torch.stack(squares).sum(0)
