"""A step as a function of device tensors only: fixed addresses, fixed shapes, nothing read on the host.

So it can be captured once as a CUDA graph and replayed for every token. Attention goes over the whole of the prompt
cache's buffers, whose rows behind the answer so far are hidden by a mask made from the position, on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvtool.core.kernels.attention.dispatch import attend
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.prompt_cache import PromptCache


class StaticStep:
    """One decoding step over a prompt cache of a fixed capacity.

    Parameters
    ----------
    cache : its rows behind those that are filled are set to zero: a hidden number must still be one.
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
    def stands(self) -> bool:
        """Whether the cache still has the buffers that this was made for, with room for one more row."""
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
        """Compute the step that was given; float32 `[vocabulary]`. The cache's lengths are left as they were."""
        length = self._cache.buffers[0].length
        self._row.look()
        self._cache.set_length(self._row.capacity)
        try:
            return self._decoder.compute_there(self._token[0], self._row, self._cache, position_ids=self._position)[-1]
        finally:
            self._cache.set_length(length)


def _buffers(cache: PromptCache) -> list[torch.Tensor]:
    return [side for buffer in cache.buffers for side in (buffer.keys, buffer.values)]


class _DeviceRow:
    """One row whose position only the device knows; replaces `Rows` in a cache and in attention.

    Attributes
    ----------
    positions : int64 `[1]`.
    capacity : keys that attention goes over.
    """

    def __init__(self, positions: torch.Tensor, capacity: int) -> None:
        self.positions, self.capacity = positions, capacity
        self._seen: dict[int | None, KeyRanges] = {}

    def look(self) -> None:
        """Forget the masks of the position as it was."""
        self._seen = {}

    def last(self, count: int) -> _DeviceRow:
        """Return itself: it is one."""
        return self

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend with the row: `[1, heads, 1, head_dim]` over keys `[1, kv_heads, capacity, head_dim]`."""
        if (window := params.window) not in self._seen:
            begins = None if window is None else (self.positions - window + 1).clamp_min_(0)
            self._seen[window] = KeyRanges([self.capacity - 1], self.positions, None, begins, on_device=True)
        return attend(query, key, value, params, self._seen[window])
