"""CUDA graphs: many kernels are launched by one call, without Python between them.

Work that is captured reads and writes device memory of fixed addresses and shapes, and reads nothing on the host.
Attention reads the whole of a prompt cache's buffers. A mask made from the rows' places, on the device, hides what they
do not see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from kvtool.core.kernels.attention.dispatch import attend
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.model.prompt_cache import PromptCache

T = TypeVar("T")


class CapturedWork(Generic[T]):
    """Work that is run `warm_up` times, since libraries' first calls must not be captured, then captured and replayed.
    The capture is of this thread only."""

    def __init__(self, device: str, warm_up: int) -> None:
        self._device, self._left = torch.device(device), warm_up
        self._replay: Callable[[], None] | None = None
        self._out: T
        self.why = ""  # the reason, where it could not be captured; it is then always done as it is

    @torch.inference_mode()
    def run(self, work: Callable[[], T]) -> T:
        """Do the work, the same at each call; what it returns is overwritten when it is done again."""
        if self._replay is None and not self._left and not self.why:
            self._capture(work)
        if self._replay is None:
            self._left = max(0, self._left - 1)
            return work()
        self._replay()
        return self._out

    def _capture(self, work: Callable[[], T]) -> None:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._out = work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.why = f"no CUDA graph: {next(iter(str(error).splitlines()), '')[:200]}"
            return
        current.wait_stream(side)
        self._replay = graph.replay


class StaticRows:
    """Rows whose places only the device knows: int64 `[rows]`, ascending, maybe repeated. Attention reads `capacity`
    keys."""

    def __init__(self, places: torch.Tensor, capacity: int) -> None:
        self.places, self.capacity = places, capacity
        self._seen: dict[int | None, KeyRanges] = {}

    def __len__(self) -> int:
        return len(self.places)

    def last(self, count: int) -> StaticRows:
        return StaticRows(self.places[-count:], self.capacity)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        return attend(query, key, value, params, self.seen(params.window))

    def seen(self, window: int | None) -> KeyRanges:
        if window not in self._seen:
            begins = None if window is None else (self.places - window + 1).clamp_min_(0)
            last = [self.capacity - 1] * len(self)
            self._seen[window] = KeyRanges(last, self.places, None, begins, on_device=True)
        return self._seen[window]


def memory_of(cache: PromptCache) -> list[torch.Tensor]:
    return [side for buffer in cache.buffers for side in (buffer.keys, buffer.values)]
