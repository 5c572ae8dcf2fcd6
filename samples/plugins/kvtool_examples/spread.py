"""A fusion mode that recomputes rows at equal distances, whatever their tokens: a baseline for choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtool.core.fusion.plan import Cost, Plan, PromptRows
from kvtool.core.fusion.selectors.base import Selector, share_of


@dataclass(frozen=True, slots=True)
class Spread(Selector):
    """Recompute a share of every chunk that is not exact: its first row, and others evenly spaced after it.

    The field has the name of an existing option (`--ratio`), so that option sets it.
    """

    name: ClassVar[str] = "spread"
    knob: ClassVar[str] = "ratio"
    reason: ClassVar[str] = "one of every few"
    ratio: float = 0.15

    def cost(self, prompt: PromptRows) -> Cost:
        return Cost(overlapped=sum(share_of(self.ratio, tokens) for tokens in prompt.hit_chunks))

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        rows = torch.zeros(plan.length, dtype=torch.bool)
        for segment in plan.chunks:
            if segment.status == "hit":
                count, tokens = share_of(self.ratio, len(segment.ids)), len(segment.ids)
                rows[[segment.start + number * tokens // count for number in range(count)]] = True
        return rows
