"""One prompt's keys and values in preallocated buffers, usable as a `transformers` cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvtool.core.errors import ModelError

Observer = Callable[[int, int], None]


class Placed(Protocol):
    """Rows that know their prompt positions, int64 `[rows]` on the model's device."""

    @property
    def positions(self) -> torch.Tensor: ...


class BufferLayer(CacheLayerMixin):
    """Keys and values `[1, kv_heads, capacity, head_dim]` of one layer; the first `length` rows are filled."""

    is_sliding = False

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffers exist from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Not to be used: rows know their places (`PromptCache.update`)."""
        raise NotImplementedError("rows are written to a prompt cache with their positions")

    def scatter(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows at prompt positions `rows`."""
        self.keys.index_copy_(2, rows, keys)
        self.values.index_copy_(2, rows, values)

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def reserve(self, length: int) -> None:
        """Make room for `length` rows."""
        capacity = self.keys.shape[2]
        if length > capacity:  # rare: the caller reserves what it plans to generate
            room = torch.empty_like(self.keys[:, :, :1]).expand(-1, -1, max(length - capacity, capacity // 2 + 1), -1)
            self.keys = torch.cat([self.keys, room], 2)
            self.values = torch.cat([self.values, room], 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class PromptCache(Cache):
    """The fused cache of one prompt.

    During a pass `rows` names the prompt positions the model computes, and `update` scatters them; so it does when a
    cache is extended.

    Parameters
    ----------
    shape : `[1, kv_heads, capacity, head_dim]` of one layer.
    before_update : called with (layer, how many rows) before they are scattered: the loader is waited for here.
    after_update : called with the layer when they are there, before anything attends to them.

    Attributes
    ----------
    dropped : tokens of the prompt that have no row here: by so much is the position of a row that is appended larger
        than its place.
    """

    def __init__(self, layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> None:
        self.buffers = [BufferLayer(shape, dtype, device) for _ in range(layers)]
        super().__init__(layers=list(self.buffers))
        self.rows: Placed | None = None
        self.before_update: Observer | None = None
        self.after_update: Callable[[int], None] | None = None
        self.dropped = 0

    def set_length(self, length: int) -> None:
        """Declare the first `length` rows of every layer filled (they are, or will be before they are read)."""
        for buffer in self.buffers:
            buffer.reserve(length)
            buffer.length = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = self.buffers[layer_idx]
        if self.before_update is not None:
            self.before_update(layer_idx, key_states.shape[2])
        if self.rows is None:
            raise ModelError("rows over a prompt cache need their positions", "this is a bug in kvtool")
        buffer.scatter(self.rows.positions, key_states, value_states)
        if self.after_update is not None:
            self.after_update(layer_idx)
        return buffer.view()
