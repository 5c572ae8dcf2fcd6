"""Union of three signals: the question's attention, the tokens' sensitivity, and link tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.base import Pooling
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.infoflow import POOLING, Infoflow
from kvtool.core.options.option import option


@dataclass(frozen=True, slots=True)
class Union(Infoflow):
    """Rank tokens by the question's attention × their sensitivity, stored at ingest: those that are both attended to
    and wrong. `links` is 0 by default, since a warm lead-in makes them useless."""

    name: ClassVar[str] = "union"
    pooling: Pooling = option("both", POOLING)
    weighting: float = option(1.0, "Power of the tokens' sensitivity; 0: attention only.", lowest=0)
    links: int = option(0, "Link tokens of every chunk, which rank first.", lowest=0)

    def weighed(self, plan: Plan, attention: torch.Tensor) -> torch.Tensor:
        worth = attention * plan.sensitivity() ** self.weighting
        worth[self._links(plan)] = torch.inf
        return worth

    def reasons(self, plan: Plan, recomputed: torch.Tensor) -> dict[str, torch.Tensor]:
        links = self._links(plan) & recomputed
        return {Epic.reason: links, self.reason: recomputed & ~links}

    def _links(self, plan: Plan) -> torch.Tensor:
        return Epic(self.links).rows(plan) if self.links else plan.mask()
