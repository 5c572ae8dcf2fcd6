"""What each layer's attention is: how its keys are positioned, how far back a row sees, how scores are shaped."""

from __future__ import annotations

from collections.abc import Mapping
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
