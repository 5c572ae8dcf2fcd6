"""What each layer keeps and how it attends; the prompt cache: one prompt's keys and values, in preallocated buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvtool.core.model.kinds import KVShape


class BufferLayer:
    """Rotated keys, and values, `[1, kv_heads, capacity, head_dim]` of one layer; the first `length` rows are filled.
    Of a joint shape both are views of `joint`, `[1, kv_heads, capacity, value_dim + key_dim]`."""

    is_sliding = is_compileable = False
    is_initialized = True

    def __init__(self, shape: KVShape, capacity: int, dtype: torch.dtype, device: str) -> None:
        self.shape = shape
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self.joint: torch.Tensor | None = None
        widths = [shape.value_dim + shape.key_dim] if shape.joint else [shape.key_dim, shape.value_dim]
        self._hold([torch.empty((1, shape.heads, capacity, width), dtype=dtype, device=device) for width in widths])
        self.length = 0

    def _hold(self, sides: Sequence[torch.Tensor]) -> None:
        if self.shape.joint:
            (self.joint,) = sides
            self.values, self.keys = self.joint.split([self.shape.value_dim, self.shape.key_dim], 3)
        else:
            self.keys, self.values = sides

    def scatter(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys.index_copy_(2, rows, keys)
        self.values.index_copy_(2, rows, values)

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self.keys if self.joint is None else self.joint
        return keys[:, :, : self.length], self.values[:, :, : self.length]

    def reserve(self, length: int) -> None:
        capacity = self.keys.shape[2]
        if length > capacity:  # rare: the caller reserves what it plans to generate
            more = max(length - capacity, capacity // 2 + 1)
            sides = [self.keys, self.values] if self.joint is None else [self.joint]
            self._hold([torch.cat([side, side.new_zeros((*side.shape[:2], more, side.shape[3]))], 2) for side in sides])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length


class PromptCache:
    """The fused cache of one prompt."""

    is_recurrent = False  # some layers keep a state (`StateCache`)

    def __init__(self, buffers: Sequence[BufferLayer]) -> None:
        self.buffers = list(buffers)
        # The position of each place, where some differ from it since tokens of the prompt have no row here.
        self.position_ids: list[int] | None = None

    @property
    def dropped(self) -> int:
        """By how much the position of a row that is appended is larger than its place."""
        return self.position_ids[-1] + 1 - len(self.position_ids) if self.position_ids else 0

    @property
    def nbytes(self) -> int:
        return sum(buffer.keys.nbytes + buffer.values.nbytes for buffer in self.buffers)

    def reserve(self, length: int) -> None:
        for buffer in self.buffers:
            buffer.reserve(length)

    def set_length(self, length: int) -> None:
        """Declare the first `length` rows of every layer filled (they are, or will be before they are read)."""
        self.reserve(length)
        for buffer in self.buffers:
            buffer.length = length
        if self.position_ids:
            more = range(len(self.position_ids), length)
            self.position_ids.extend(row + self.dropped for row in more)

    @contextmanager
    def filled(self, length: int) -> Iterator[None]:
        before = self.buffers[0].length
        for buffer in self.buffers:
            buffer.length = length
        try:
            yield
        finally:
            for buffer in self.buffers:
                buffer.length = before
