"""CUDA graph of a decoding step: many small kernels are launched by one call, without Python between them.

A step is a function of device tensors only: fixed addresses, fixed shapes, nothing read on the host. So it is captured
once and replayed for every token. Attention reads the whole of the prompt cache's buffers. A mask made from the
position, on the device, hides the rows after the answer so far.
"""

from __future__ import annotations

import torch

from kvtool.core.kernels.attention.dispatch import attend
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache

# Steps before the capture: they make what libraries make at their first call, which a capture must not contain. A
# capture takes about as long as two steps and is repaid after a few; an answer of two tokens needs none.
_WARM_UP = 2


class CudaGraphBackend:
    """Steps by replaying a graph that was captured at the third step; by the model's own forward where that fails.

    The capture is of this thread only: another thread may use the device meanwhile.

    Attributes
    ----------
    why : the reason, where a graph could not be captured.
    """

    def __init__(self, decoder: Decoder, cache: PromptCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._step: StaticStep | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0, dtype=torch.float32)
        self._warm = 0
        self.why = ""

    @property
    def name(self) -> str:
        return "torch" if self.why else "cuda graph"

    def step(self, token: int) -> torch.Tensor:
        """Append one token; return float32 `[vocabulary]`, overwritten by the next step."""
        if self.why:
            return self._decoder.extend([token], self._cache)[-1]
        step = self._current_step()
        if self._graph is None and self._warm >= _WARM_UP and not self._capture(step):
            return self._decoder.extend([token], self._cache)[-1]
        step.give(token)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._logits = step.run()
            self._warm += 1
        self._cache.set_length(self._cache.buffers[0].length + 1)
        return self._logits

    def _current_step(self) -> StaticStep:
        """Return the step over the cache as it is: a new one after its buffers have grown."""
        if self._step is None or not self._step.is_valid:
            for buffer in self._cache.buffers:
                buffer.reserve(buffer.length + 1)
            self._step, self._graph, self._warm = StaticStep(self._decoder, self._cache), None, 0
        return self._step

    def _capture(self, step: StaticStep) -> bool:
        """Record the kernels of one step, of which none runs; where that fails, note the reason and return False."""
        device = torch.device(self._decoder.device)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    logits = step.run()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.why = f"no CUDA graph: {next(iter(str(error).splitlines()), '')[:200]}"
            return False
        current.wait_stream(side)
        self._graph, self._logits = graph, logits
        return True


class StaticStep:
    """A decoding step over a prompt cache of a fixed capacity.

    Parameters
    ----------
    cache : its rows after the filled ones are set to zero: a hidden number must still be one.
    """

    def __init__(self, decoder: Decoder, cache: PromptCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._token = torch.zeros((1, 1), dtype=torch.int64, device=decoder.device)
        self._place = torch.zeros(1, dtype=torch.int64, device=decoder.device)
        self._position = torch.zeros_like(self._place) if cache.dropped else self._place
        self._row = _DeviceRow(self._place, cache.buffers[0].keys.shape[2])
        self._memory = _buffers(cache)
        length = cache.buffers[0].length
        with torch.inference_mode():
            for buffer in cache.buffers:
                buffer.keys[:, :, length:].zero_()
                buffer.values[:, :, length:].zero_()

    @property
    def is_valid(self) -> bool:
        """Return True if the cache still has the buffers that this was made for, and one more row fits."""
        same = all(one is other for one, other in zip(_buffers(self._cache), self._memory, strict=True))
        return same and self._cache.buffers[0].length < self._row.capacity

    @torch.inference_mode()
    def give(self, token: int) -> None:
        """Set the next step's token and position."""
        self._token.fill_(token)
        self._place.fill_(self._cache.buffers[0].length)
        if self._position is not self._place:
            self._position.fill_(self._cache.buffers[0].length + self._cache.dropped)

    @torch.inference_mode()
    def run(self) -> torch.Tensor:
        """Compute the step that was given; return float32 `[vocabulary]`. The cache's lengths are left as they were."""
        length = self._cache.buffers[0].length
        self._row.look()
        self._cache.set_length(self._row.capacity)
        try:
            return self._decoder.compute(self._token[0], self._row, self._cache, position_ids=self._position)[-1]
        finally:
            self._cache.set_length(length)


def _buffers(cache: PromptCache) -> list[torch.Tensor]:
    return [side for buffer in cache.buffers for side in (buffer.keys, buffer.values)]


class _DeviceRow:
    """A row whose place only the device knows; replaces `QueryRows` in a cache and in attention.

    Attributes
    ----------
    places : int64 `[1]`.
    capacity : keys that attention reads.
    """

    def __init__(self, places: torch.Tensor, capacity: int) -> None:
        self.places, self.capacity = places, capacity
        self._seen: dict[int | None, KeyRanges] = {}

    def look(self) -> None:
        """Drop the masks of the previous place."""
        self._seen = {}

    def last(self, count: int) -> _DeviceRow:
        """Return itself: it is a single row."""
        return self

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend with the row: `[1, heads, 1, head_dim]` over keys `[1, kv_heads, capacity, head_dim]`."""
        if (window := params.window) not in self._seen:
            begins = None if window is None else (self.places - window + 1).clamp_min_(0)
            self._seen[window] = KeyRanges([self.capacity - 1], self.places, None, begins, on_device=True)
        return attend(query, key, value, params, self._seen[window])
