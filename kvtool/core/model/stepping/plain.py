"""A step by the model's own forward: any family, any device, and what other steppers are measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.prompt_cache import PromptCache


class TorchStepper:
    """Steps by the model's own forward, hooks and all; `why` another stepper does not serve."""

    name = "torch"

    def __init__(self, decoder: Decoder, cache: PromptCache, why: str = "") -> None:
        self._decoder = decoder
        self._cache = cache
        self.why = why

    def step(self, token: int) -> torch.Tensor:
        """Append one token; float32 `[vocabulary]`."""
        return self._decoder.extend([token], self._cache)[-1]
