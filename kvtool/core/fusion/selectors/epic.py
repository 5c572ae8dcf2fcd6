"""EPIC (arXiv 2410.15332): recompute link tokens of each chunk (AttnLink, later LegoLink)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvtool.core.fusion.plan import Cost, Plan, PromptRows
from kvtool.core.fusion.selectors.base import Selector

Link = Literal["initial", "final", "boundary"]


@dataclass(frozen=True, slots=True)
class Epic(Selector):
    """Recompute `link_tokens` tokens of every chunk that is not exact, clamped to the chunk (section 4, LegoLink).

    A chunk that is prefilled separately has an attention sink at its start, which recomputing its link tokens removes.
    `link`: the first tokens of a chunk (the paper), the last ones, or those on both sides of each boundary. `shift`:
    reused rows move by the mean change of the recomputed ones (`fusion/shift.py`), which the paper does not do.
    """

    name: ClassVar[str] = "epic"
    ignores_question: ClassVar[bool] = True
    knob: ClassVar[str] = "link_tokens"
    reason: ClassVar[str] = "link token"
    link_tokens: int = 16
    link: Link = "initial"
    shift: bool = True

    def cost(self, prompt: PromptRows) -> Cost:
        return Cost(overlapped=sum(min(self.link_tokens, tokens) for tokens in prompt.hit_chunks))

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        rows = torch.zeros(plan.length, dtype=torch.bool)
        first = {"initial": self.link_tokens, "final": 0, "boundary": self.link_tokens - self.link_tokens // 2}
        for segment in plan.chunks:
            if segment.status == "hit":
                head = min(first[self.link], len(segment.ids))
                tail = min(self.link_tokens - first[self.link], len(segment.ids) - head)
                rows[segment.start : segment.start + head] = True
                rows[segment.stop - tail : segment.stop] = True
        return rows
