"""Select the cached rows that are computed again: the protocol of a fusion mode."""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.plan import Plan, Segment

if TYPE_CHECKING:
    from kvtool.core.fusion.cost import Cost, PromptRows

Pooling = Literal["rows", "last", "both"]  # see fusion/layerwise_selection.py


def share_of(share: float, context: int) -> int:
    """⌈share · context⌉ of the decimal that was meant: 0.07 · 100 is 7, though the product is 7.000000000000001."""
    return math.ceil(round(share * context, 6))


class Selector(ABC):
    """A fusion mode. Question and holes are always computed; a selector names the cached rows computed besides.

    Subclasses are frozen dataclasses whose fields are the mode's parameters.

    Attributes
    ----------
    uses_cache : False: the whole prompt is computed, whatever is stored.
    lossless : the logits are those of full prefill, by construction.
    looked_into : its cache is: what is reused is read through windows, too, that no computed row sees.
    knob : the field that says how much is recomputed, such as `ratio`; "" where there is none.
    reason : why a row is recomputed.
    """

    name: ClassVar[str]
    uses_cache: ClassVar[bool] = True
    lossless: ClassVar[bool] = False
    looked_into: ClassVar[bool] = False
    knob: ClassVar[str] = ""
    reason: ClassVar[str] = ""

    def cost(self, prompt: PromptRows) -> Cost:
        """What it reads and computes for a prompt, as far as that can be told beforehand."""
        raise NotImplementedError(f"{self.name} does not say what it costs")

    def expected_seconds(self, prompt: PromptRows) -> float:
        """Return the seconds from the laid-out prompt to the first token that the mode is expected to take."""
        return prompt.seconds(self.cost(prompt), self.name)

    @property
    def amount(self) -> float:
        """How much is recomputed, by the field that `knob` names."""
        return float(getattr(self, self.knob))

    def with_amount(self, amount: float) -> Self:
        """Make a selector of the same mode that recomputes so much."""
        return cast(Self, replace(cast(Any, self), **{self.knob: amount}))

    @property
    def pooling(self) -> Pooling:
        """How the rows of the question's attention become one, where it is asked for."""
        return "rows"

    @property
    def shift(self) -> bool:
        """Whether rows that are reused move as the recomputed ones among them do (fusion/shift.py)."""
        return False

    def asked(self, plan: Plan, layers: int) -> range:
        """Layers whose question attention (fusion/layerwise_selection.py) the mode ranks rows by; empty: by none."""
        return range(0)

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        """Bool `[plan.length]`: cached rows to compute from the first layer on (exact ones are never needed).

        `attention` : float32 `[plan.length]`, how much the question looks at each position; None: it was not asked.
        """
        return torch.zeros(plan.length, dtype=torch.bool)

    def reads(self, plan: Plan, layers: int) -> list[Segment]:
        """Segments whose records are read: of which a row is reused, or looked at before it is computed anew."""
        if not self.uses_cache:
            return []
        if self.asked(plan, layers) or self.narrowing(plan, layers):
            return plan.cached
        rows = self.rows(plan)
        return [segment for segment in plan.cached if not rows[segment.start : segment.stop].all()]

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
