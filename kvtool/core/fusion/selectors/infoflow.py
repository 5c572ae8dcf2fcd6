"""InfoFlow KV (arXiv 2603.05353): recompute the tokens that the question attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtool.core.fusion.plan import Cost, Plan, PromptRows
from kvtool.core.fusion.selectors.base import Pooling, Selector, share_of
from kvtool.core.options.option import option

POOLING = "How the question's rows of attention become one: their norm, the last one, or the mean of both."


@dataclass(frozen=True, slots=True)
class Infoflow(Selector):
    """Recompute the share `ratio` of the cached context tokens, ⌈ratio · N⌉ rows, with the highest attention of the
    question, over reused KV at true positions."""

    name: ClassVar[str] = "infoflow"
    knob: ClassVar[str] = "ratio"
    reason: ClassVar[str] = "question attention"
    ratio: float = 0.15
    from_depth: float = option(0.5, "Share of the depth from which attention counts.", lowest=0, highest=1)
    pooling: Pooling = option("rows", POOLING)
    shift: bool = True

    def cost(self, prompt: PromptRows) -> Cost:
        rows = min(share_of(self.ratio, prompt.context), prompt.hits)
        if rows and self.ratio >= 1:  # nothing to rank, and recomputed chunks are not read
            return Cost(reads=("leading", "exact"), computes=("hit",))
        return Cost(after=rows)

    def ranking_layers(self, plan: Plan, layers: int) -> range:
        ranks = 0 < self.ratio < 1 and bool(plan.hit_rows().any())
        return range(min(int(self.from_depth * layers), layers - 1), layers) if ranks else range(0)

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        if attention is None:
            return plan.hit_rows() if self.ratio > 0 else plan.mask()
        places = plan.hit_rows().nonzero()[:, 0]
        count = min(share_of(self.ratio, plan.context_tokens), len(places))
        rows = plan.mask()
        rows[places[self.weighed(plan, attention)[places].topk(count).indices]] = True
        return rows

    def weighed(self, plan: Plan, attention: torch.Tensor) -> torch.Tensor:
        return attention
