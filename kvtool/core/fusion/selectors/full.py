"""Full recompute: prefill the whole prompt, the reference of all modes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.core.fusion.plan import CACHED, Cost, PromptRows
from kvtool.core.fusion.selectors.base import Selector


@dataclass(frozen=True, slots=True)
class Full(Selector):
    name: ClassVar[str] = "full"
    reason: ClassVar[str] = "full recompute"
    uses_cache: ClassVar[bool] = False
    lossless: ClassVar[bool] = True

    def cost(self, prompt: PromptRows) -> Cost:
        return Cost(reads=(), computes=CACHED)
