"""What a fusion mode decides: which cached rows are computed again."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar, Literal

import torch

from kvtool.core.fusion.plan import Plan

Pooling = Literal["rows", "last", "both"]  # see fusion/question.py
LayerKV = tuple[torch.Tensor, torch.Tensor]


class Selector(ABC):
    """A fusion mode. Question and holes are always computed; a selector names the cached rows computed besides.

    Subclasses are frozen dataclasses whose fields are the mode's parameters.
    """

    name: ClassVar[str]
    uses_cache: ClassVar[bool] = True
    reason: ClassVar[str] = ""  # why a row is recomputed

    @property
    def pooling(self) -> Pooling:
        """Of the question's attention, where it is asked for."""
        return "rows"

    def asked(self, plan: Plan, layers: int) -> range:
        """Layers whose question attention (fusion/question.py) the mode ranks rows by; empty: by none."""
        return range(0)

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        """Bool `[plan.length]`: cached rows to compute from the first layer on (exact ones are never needed).

        `attention` : float32 `[plan.length]`, how much the question looks at each position; None: it was not asked.
        """
        return torch.zeros(plan.length, dtype=torch.bool)

    def reasons(self, plan: Plan, recomputed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Why each of the recomputed rows (bool `[plan.length]`) was chosen; every row has one reason."""
        return {self.reason: recomputed}

    def narrowing(self, plan: Plan, layers: int) -> dict[int, int]:
        """Layers before which the recomputed rows are narrowed, and how many stay."""
        return {}

    def worth(self, new: LayerKV, old: LayerKV) -> torch.Tensor:
        """What a row is worth recomputing, float32 `[rows]`: those of the highest worth stay.

        Parameters
        ----------
        new, old : recomputed and reused (keys, values) of the rows, `[1, kv_heads, rows, head_dim]` each.
        """
        raise NotImplementedError(f"{self.name} does not narrow rows")
