"""Decoding by a CUDA graph (`captured.py`): a step is a function of device tensors only, captured once an answer."""

from __future__ import annotations

import torch

from kvtool.core.model.captured import CapturedWork, StaticRows, memory_of
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache

# A capture takes about as long as two steps and is repaid after a few; an answer of two tokens needs none.
_WARM_UP = 2


class CudaGraphBackend:
    """Steps by replaying a graph that was captured at the third step; by the model's own forward where that fails."""

    def __init__(self, decoder: Decoder, cache: PromptCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._step: StaticStep | None = None
        self.why = ""

    @property
    def name(self) -> str:
        return "torch" if self.why else "cuda graph"

    def step(self, token: int) -> torch.Tensor:
        if self.why:
            return self._decoder.extend([token], self._cache)[-1]
        step = self._current_step()
        step.give(token)
        logits = step.captured.run(step.run)
        self.why = step.captured.why
        self._cache.set_length(self._cache.buffers[0].length + 1)
        return logits

    def _current_step(self) -> StaticStep:
        if self._step is None or not self._step.is_valid:
            for buffer in self._cache.buffers:
                buffer.reserve(buffer.length + 1)
            self._step = StaticStep(self._decoder, self._cache)
        return self._step


class StaticStep:
    """A decoding step over a prompt cache of a fixed capacity. Unfilled rows are set to zero: hidden values must be
    numbers."""

    def __init__(self, decoder: Decoder, cache: PromptCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._token = torch.zeros((1, 1), dtype=torch.int64, device=decoder.device)
        self._place = torch.zeros(1, dtype=torch.int64, device=decoder.device)
        self._position = torch.zeros_like(self._place) if cache.dropped else self._place
        self._capacity = cache.buffers[0].keys.shape[2]
        self._memory = memory_of(cache)
        self.captured = CapturedWork[torch.Tensor](decoder.device, warm_up=_WARM_UP)
        length = cache.buffers[0].length
        with torch.inference_mode():
            for side in self._memory:
                side[:, :, length:].zero_()

    @property
    def is_valid(self) -> bool:
        same = all(side is other for side, other in zip(memory_of(self._cache), self._memory, strict=True))
        return same and self._cache.buffers[0].length < self._capacity

    @torch.inference_mode()
    def give(self, token: int) -> None:
        self._token.fill_(token)
        self._place.fill_(self._cache.buffers[0].length)
        if self._position is not self._place:
            self._position.fill_(self._cache.buffers[0].length + self._cache.dropped)

    @torch.inference_mode()
    def run(self) -> torch.Tensor:
        """Compute the step that was given; return float32 `[vocabulary]`. The cache's lengths are left as they were."""
        rows = StaticRows(self._place, self._capacity)
        with self._cache.filled(self._capacity):
            return self._decoder.compute(self._token[0], rows, self._cache, position_ids=self._position)[-1]
