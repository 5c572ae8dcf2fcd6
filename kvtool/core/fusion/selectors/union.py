"""The union of three signals: what the question looks at, what deviates, and where chunks are linked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors.base import LayerKV, Selector
from kvtool.core.fusion.selectors.infoflow import Infoflow
from kvtool.core.fusion.selectors.ranking import context_tokens, hit_rows, share_of, squared_error


@dataclass(frozen=True, slots=True)
class Union(Selector):
    """Rank tokens by the question's attention × ‖ΔV‖: only a row that is looked at and wrong is worth its cost.

    Every context row runs through the layers before `check_layer`, where ΔV is measured (as `blend` does).

    Attributes
    ----------
    ratio : share of the cached context tokens that is recomputed, 0 … 1; ⌈ratio · N⌉ rows.
    check_layer : ≥ 1; at layer 0 nothing deviates.
    from_depth : see Infoflow.
    union_links : first tokens of every chunk, before all others; none by default: a warm lead-in leaves them no use.
    """

    name: ClassVar[str] = "union"
    ratio: float = 0.15
    check_layer: int = 1
    from_depth: float = 0.5
    union_links: int = 0

    def asked(self, plan: Plan, layers: int) -> range:
        return Infoflow(self.ratio, self.from_depth).asked(plan, layers)

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        return hit_rows(plan) if self.ratio > 0 else plan.mask()

    def weighed(self, plan: Plan, attention: torch.Tensor) -> torch.Tensor:
        weighed = attention.clone()
        for segment in plan.cached_chunks:
            weighed[segment.start : segment.start + min(self.union_links, len(segment.ids))] = torch.inf
        return weighed

    def narrowing(self, plan: Plan, layers: int) -> dict[int, int]:
        if not self.asked(plan, layers):
            return {}
        return {min(self.check_layer, layers - 1): share_of(self.ratio, context_tokens(plan))}

    def worth(
        self, new: LayerKV, old: LayerKV, positions: torch.Tensor, attention: torch.Tensor | None
    ) -> torch.Tensor:
        deviation = squared_error(new[1], old[1]).sqrt()
        return deviation if attention is None else attention[positions] * deviation.clamp_min(1e-30)
