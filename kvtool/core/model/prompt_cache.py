"""What each layer keeps and how it attends; the prompt cache: one prompt's keys and values, in preallocated buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kvtool.core.checkpoint.dense import DenseModel


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of a layer's keys and values: `[heads, tokens, key_dim]` and `[heads, tokens, value_dim]`. Joint ones
    share one row, values first; attention takes the whole row as the key (mla.py)."""

    heads: int
    key_dim: int
    value_dim: int
    joint: bool = False

    @property
    def numbers(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)

    @property
    def channels(self) -> int:
        return self.heads * max(self.key_dim, self.value_dim)

    @property
    def attended(self) -> int:
        return self.key_dim + (self.value_dim if self.joint else 0)

    @property
    def is_plain(self) -> bool:
        return self.key_dim == self.value_dim and not self.joint

    def empty(self, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = torch.empty(self.numbers * tokens, dtype=dtype)
        keys, values = buffer.split([self.heads * tokens * dim for dim in (self.key_dim, self.value_dim)])
        return keys.view(self.heads, tokens, self.key_dim), values.view(self.heads, tokens, self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerKind:
    rotation: str | None  # the RoPE's name in the model's rotary module, "" of a single one; None: keys are not rotated
    window: int | None  # how many positions a row sees, its own the last; None: all before it
    softcap: float | None
    sinks: bool  # each head has a score without a key
    tempered: bool  # queries grow with their position (Ministral 3, Llama 4)
    shape: KVShape
    source: int | None = None  # number of the layer whose keys and values it attends to; None: its own

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.softcap is None and not self.sinks and not self.tempered


@dataclass(frozen=True, slots=True)
class Sample:
    """The keys of a layer for one and the same row at some positions, float32 `[kv_heads, positions, key_dim]`."""

    positions: tuple[int, ...]
    keys: torch.Tensor


@dataclass(frozen=True, slots=True)
class Outline:
    """`base`: the decoder without its LM head. `attending`: numbers of the layers that have keys and values, those of
    `kinds`. `samples`: keys of a layer of each kind, by its number, where the layout of its RoPE is checked."""

    base: Any
    attending: tuple[int, ...]
    kinds: tuple[LayerKind, ...]
    samples: Mapping[int, Sample] = field(default_factory=dict)


def outline_of(model: DenseModel) -> Outline:
    listed = model.architecture
    shape = KVShape(listed.kv_heads, listed.head_dim, listed.head_dim)
    kinds = tuple(
        LayerKind(rotation, window, listed.softcap, sinks=False, tempered=False, shape=shape)
        for rotation, window in zip(listed.rotations, listed.windows, strict=True)
    )
    return Outline(model.model, tuple(range(len(kinds))), kinds)


def rotary_of(base: Any) -> Any:
    modules = [child for child in base.children() if any("inv_freq" in name for name, _ in child.named_buffers())]
    return getattr(base, "rotary_emb", None) or next((module for module in modules if not module._modules), None)


def tables_of(rotary: Any, name: str, like: torch.Tensor, positions: torch.Tensor) -> Any:
    return rotary(like, positions[None], name) if name else rotary(like, position_ids=positions[None])


def angles_of(rotary: Any, name: str, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a RoPE's cos and sin `[1, positions, rotary_dim]` in the dtype of `like`, as the model does."""
    tables = tables_of(rotary, name, like, positions)
    if isinstance(tables, torch.Tensor):  # complex numbers of pairs of neighbours (DeepSeek V2)
        return tables.real.repeat_interleave(2, -1), tables.imag.repeat_interleave(2, -1)
    cos, sin = tables
    return cos, sin


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
