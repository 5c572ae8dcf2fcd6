"""Full KV reuse (Prompt Cache, MLSys'24): recompute nothing but the question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.core.fusion.plan import Cost, PromptRows
from kvtool.core.fusion.selectors.base import Selector


@dataclass(frozen=True, slots=True)
class Reuse(Selector):
    name: ClassVar[str] = "reuse"
    ignores_question: ClassVar[bool] = True

    def cost(self, prompt: PromptRows) -> Cost:
        return Cost()
