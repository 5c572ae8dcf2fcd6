"""Decoding by a CUDA graph, captured once an answer: a step's kernels are launched by one call, without Python between.

What is captured reads and writes device memory of fixed addresses and shapes, and reads nothing on the host. So
attention reads the whole of a prompt cache's buffers. A mask made from the row's place, on the device, hides what it
does not see.
"""

from __future__ import annotations

import torch

from kvtool.core.kernels.attention.dispatch import attend
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache

# Steps before the capture, since libraries' first calls must not be captured. A capture takes about as long as two
# steps and is repaid after a few; an answer of two tokens needs none.
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
        length = self._cache.buffers[0].length
        if self._step is None or not self._step.is_valid:
            self._cache.reserve(length + 1)
            self._step = StaticStep(self._decoder, self._cache)
        self._step.give(token)
        logits = self._step.replay()
        self.why = self._step.why
        self._cache.set_length(length + 1)
        return logits


class StaticStep:
    """A decoding step over a prompt cache of a fixed capacity. Unfilled rows are set to zero: hidden values must be
    numbers. `why` it could not be captured."""

    def __init__(self, decoder: Decoder, cache: PromptCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._token = torch.zeros((1, 1), dtype=torch.int64, device=decoder.device)
        self._place = torch.zeros(1, dtype=torch.int64, device=decoder.device)
        self._position = torch.zeros_like(self._place) if cache.dropped else self._place
        self._capacity = cache.buffers[0].keys.shape[2]
        self._memory = _memory_of(cache)
        self._left, self.why = _WARM_UP, ""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor
        length = cache.buffers[0].length
        with torch.inference_mode():
            for side in self._memory:
                side[:, :, length:].zero_()

    @property
    def is_valid(self) -> bool:
        same = all(side is other for side, other in zip(_memory_of(self._cache), self._memory, strict=True))
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
        row = _StaticRow(self._place, self._position, self._capacity)
        with self._cache.filled(self._capacity):
            return self._decoder.compute(self._token[0], row, self._cache)[-1]

    @torch.inference_mode()
    def replay(self) -> torch.Tensor:
        """Do the same by the graph, once it is captured; the next step overwrites what this one returns."""
        if self._graph is None and not self._left and not self.why:
            self._capture()
        if self._graph is None:
            self._left = max(0, self._left - 1)
            return self.run()
        self._graph.replay()
        return self._logits

    def _capture(self) -> None:
        """Capture what this thread launches."""
        current = torch.cuda.current_stream(self._decoder.device)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(current.device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._logits = self.run()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.why = f"no CUDA graph: {next(iter(str(error).splitlines()), '')[:200]}"
            return
        current.wait_stream(side)
        self._graph = graph


class _StaticRow:
    """A row whose place and position, int64 `[1]`, only the device knows. Its attention reads `capacity` keys."""

    def __init__(self, places: torch.Tensor, positions: torch.Tensor, capacity: int) -> None:
        self.places, self.positions, self._capacity = places, positions, capacity
        self._seen: dict[int | None, KeyRanges] = {}

    def last(self, count: int) -> _StaticRow:
        return self

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        if (window := params.window) not in self._seen:
            begins = None if window is None else (self.places - window + 1).clamp_min_(0)
            self._seen[window] = KeyRanges([self._capacity - 1], self.places, None, begins, on_device=True)
        return attend(query, key, value, params, self._seen[window])


def _memory_of(cache: PromptCache) -> list[torch.Tensor]:
    return [side for buffer in cache.buffers for side in (buffer.keys, buffer.values)]
