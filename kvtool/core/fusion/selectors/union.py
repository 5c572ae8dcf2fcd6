"""The union of three signals: what the question looks at, what deviates, and where chunks are linked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtool.core.fusion.cost import Cost, PromptRows
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.base import Pooling, Selector
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.infoflow import Infoflow
from kvtool.core.fusion.selectors.ranking import asking_cost, context_tokens, highest, hit_rows, share_of


@dataclass(frozen=True, slots=True)
class Union(Selector):
    """Rank tokens by the question's attention × their sensitivity: only a row that is looked at and wrong is worth
    its cost. The sensitivity was kept at ingest, so that no layer is computed in full.

    Attributes
    ----------
    ratio : share of the cached context tokens that is recomputed, 0 … 1; ⌈ratio · N⌉ rows.
    from_depth, pooling : see Infoflow.
    weighting : power of the sensitivity; 0: attention alone.
    union_links : first tokens of every chunk, before all others; none by default: a warm lead-in leaves them no use.
    """

    name: ClassVar[str] = "union"
    knob: ClassVar[str] = "ratio"
    reason: ClassVar[str] = "question attention"
    ratio: float = 0.15
    from_depth: float = 0.5
    pooling: Pooling = "both"
    weighting: float = 1.0
    union_links: int = 0

    def cost(self, prompt: PromptRows) -> Cost:
        return asking_cost(prompt, self.ratio)

    def asked(self, plan: Plan, layers: int) -> range:
        return Infoflow(self.ratio, self.from_depth).asked(plan, layers)

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        if attention is None:
            return hit_rows(plan) if self.ratio > 0 else plan.mask()
        worth = attention * plan.sensitivity() ** self.weighting
        worth[self._links(plan)] = torch.inf
        return highest(worth, hit_rows(plan), share_of(self.ratio, context_tokens(plan)))

    def reasons(self, plan: Plan, recomputed: torch.Tensor) -> dict[str, torch.Tensor]:
        links = self._links(plan) & recomputed
        return {"link token": links, self.reason: recomputed & ~links}

    def _links(self, plan: Plan) -> torch.Tensor:
        """Bool `[plan.length]`."""
        return Epic(self.union_links).rows(plan)
