"""A fusion mode: selects the cached rows to recompute, and says what that costs."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.plan import Plan, Segment
from kvtool.core.kernels.attention.eager import mean_weights
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.model.forward import OnLayer, QueryRows

if TYPE_CHECKING:
    from kvtool.core.fusion.plan import Cost, PromptRows

Pooling = Literal["rows", "last", "both"]  # see `question_attention` (fusion/engine.py)
_BLOCK = 64  # rows whose weights exist at a time: memory grows with the prompt's length, not with its square


def share_of(share: float, context: int) -> int:
    """⌈share · context⌉ of the decimal: 0.07 · 100 gives 7, though the product is 7.000000000000001."""
    return math.ceil(round(share * context, 6))


class Selector(ABC):
    """A fusion mode, a frozen dataclass of its parameters; it names the cached rows to compute besides question and
    holes. `uses_cache`: False if the whole prompt is computed. `lossless`: the logits are those of full prefill by
    construction. `ignores_question`: the chunks' rows do not depend on the question. `knob`: the field that sets how
    much is recomputed, or "". `reason`: why a row is recomputed."""

    name: ClassVar[str]
    uses_cache: ClassVar[bool] = True
    lossless: ClassVar[bool] = False
    ignores_question: ClassVar[bool] = False
    knob: ClassVar[str] = ""
    reason: ClassVar[str] = ""

    def cost(self, prompt: PromptRows) -> Cost:
        raise NotImplementedError(f"{self.name} does not say what it costs")

    def expected_seconds(self, prompt: PromptRows) -> float:
        return prompt.seconds(self.cost(prompt))

    @property
    def amount(self) -> float:
        return float(getattr(self, self.knob))

    def with_amount(self, amount: float) -> Self:
        return cast(Self, replace(cast(Any, self), **{self.knob: amount}))

    @property
    def pooling(self) -> Pooling:
        return "rows"

    @property
    def shift(self) -> bool:
        """True if reused rows are shifted as recomputed ones of their chunk change (fusion/shift.py)."""
        return False

    def ranking_layers(self, plan: Plan, layers: int) -> range:
        """Return the layers whose question attention (`QuestionWatch`) ranks the rows; empty for none."""
        return range(0)

    def rows(self, plan: Plan, attention: torch.Tensor | None = None) -> torch.Tensor:
        """Choose the cached rows to compute from the first layer on, bool `[plan.length]`; exact ones are ignored.
        `attention`: of the question to each place, float32 `[plan.length]`; None before it is measured."""
        return torch.zeros(plan.length, dtype=torch.bool)

    def reads(self, plan: Plan, layers: int) -> list[Segment]:
        """List the segments that are read: those with a row that is reused, or ranked before its recompute."""
        if not self.uses_cache:
            return []
        if self.ranking_layers(plan, layers) or self.narrowing(plan, layers):
            return plan.cached
        rows = self.rows(plan)
        return [segment for segment in plan.cached if not rows[segment.start : segment.stop].all()]

    def reasons(self, plan: Plan, recomputed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Map each reason to its recomputed rows (bool `[plan.length]`); every row has one reason."""
        return {self.reason: recomputed}

    def narrowing(self, plan: Plan, layers: int) -> dict[int, int]:
        """Map layers to how many of the recomputed rows are kept from there on."""
        return {}

    def worth(self, new: LayerKV, old: LayerKV) -> torch.Tensor:
        """Score rows before they are narrowed, float32 `[rows]`: the highest are kept. `new`, `old`: recomputed and
        reused (keys, values) of the rows, `[1, kv_heads, rows, head_dim]` each."""
        raise NotImplementedError(f"{self.name} does not narrow rows")


class QuestionWatch(OnLayer):
    """Sum of the attention of a pass's last `count` rows. `ends`: the pass ends with the last of `layers`."""

    def __init__(
        self,
        rows: QueryRows,
        count: int,
        layers: range,
        length: int,
        pooling: Pooling,
        ends: bool,
        wait: Callable[[int], None],
    ) -> None:
        self._wait = wait
        self._rows, self._count = rows, count
        self._layers, self._pooling, self._ends = layers, pooling, ends
        self._total = torch.zeros(length, device=rows.places.device, dtype=torch.float32)

    @property
    def mean(self) -> torch.Tensor:
        return self._total / len(self._layers)

    def before_write(self, layer: int, rows: int) -> None:
        self._wait(layer)

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> bool:
        if layer not in self._layers:
            return False
        count = 1 if self._pooling == "last" else self._count
        seen, last = self._rows.seen(params.window)[slice(len(self._rows) - count, None)], self._total
        squares = torch.zeros_like(self._total)
        for first in range(0, count, _BLOCK):
            block = slice(first, min(first + _BLOCK, count))
            part = query[0, :, query.shape[2] - count :][:, block]
            weights = mean_weights(part, keys[0, :, : len(self._total)], seen[block], params)
            squares += weights.square().sum(0)
            last = weights[-1]
        pooled = squares.sqrt_()
        self._total += pooled.mul_(last).sqrt_() if self._pooling == "both" else pooled
        return self._ends and layer == self._layers[-1]
