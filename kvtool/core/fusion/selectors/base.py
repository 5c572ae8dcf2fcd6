"""What a fusion mode decides: which cached rows are computed again."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

import torch

from kvtool.core.fusion.plan import Plan


class Selector(ABC):
    """A fusion mode. Question and holes are always computed; a selector names the cached rows computed besides.

    Subclasses are frozen dataclasses whose fields are the mode's parameters.
    """

    name: ClassVar[str]
    uses_cache: ClassVar[bool] = True

    def rows(self, plan: Plan) -> torch.Tensor:
        """Bool `[plan.length]`: cached rows to compute from the first layer on (exact ones are never needed)."""
        return torch.zeros(plan.length, dtype=torch.bool)

    def narrowing(self, plan: Plan, layers: int) -> dict[int, int]:
        """Layers before which the recomputed rows are narrowed by KV deviation, and how many stay."""
        return {}

    def deviation(self, new: tuple[torch.Tensor, torch.Tensor], old: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Deviation by row, float32 `[rows]`, of (keys, values) `[1, kv_heads, rows, head_dim]`."""
        raise NotImplementedError(f"{self.name} does not narrow rows")
