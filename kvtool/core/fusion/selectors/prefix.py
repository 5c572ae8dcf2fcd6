"""Prefix caching: reuse the longest exact prefix of the prompt, compute all that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtool.core.fusion.plan import Cost, Plan, PromptRows
from kvtool.core.fusion.selectors.base import Selector


@dataclass(frozen=True, slots=True)
class Prefix(Selector):
    """Reuse the exact prefix: equal to full recompute by construction."""

    name: ClassVar[str] = "prefix"
    lossless: ClassVar[bool] = True
    ignores_question: ClassVar[bool] = True
    reason: ClassVar[str] = "after the exact prefix"

    def cost(self, prompt: PromptRows) -> Cost:
        return Cost(reads=("leading",), computes=("exact", "hit"))

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        rows = plan.mask("hit", "exact")
        for segment in plan.segments:
            if segment.status != "exact":
                break
            rows[segment.start : segment.stop] = False
        return rows
