"""Codec protocol, and shapes and formats of the keys and values that codecs take and give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from kvtool.core.codec.levels import Payload as Payload
from kvtool.core.codec.profile import Profile
from kvtool.core.errors import DamagedError

LayerKV: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # one layer's keys and values
# [kv_heads, tokens, head_dim] of K and of V; and then V's head_dim, where it is another one than K's.
Shape: TypeAlias = "tuple[int, int, int] | tuple[int, int, int, int]"
SideShape: TypeAlias = "tuple[int, int, int]"
Device: TypeAlias = "torch.device | None"  # None: main memory
Profiles = Callable[[bytes], Profile]  # by digest; raises DamagedError where no such profile is stored

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def shape_of(kv_heads: int, tokens: int, key_dim: int, value_dim: int) -> Shape:
    return (kv_heads, tokens, key_dim) if key_dim == value_dim else (kv_heads, tokens, key_dim, value_dim)


def shape_of_layer(kv: LayerKV) -> Shape:
    keys, values = kv
    return shape_of(keys.shape[0], keys.shape[1], keys.shape[2], values.shape[2])


def side_shapes(shape: Shape) -> tuple[SideShape, SideShape]:
    kv_heads, tokens, key_dim = shape[:3]
    return (kv_heads, tokens, key_dim), (kv_heads, tokens, shape[-1])


def channels_of(shapes: Sequence[Shape]) -> int:
    return max(heads * dim for shape in shapes for heads, _, dim in side_shapes(shape))


def wide_sides(kv: LayerKV, channels: int) -> torch.Tensor:
    """Stack keys and values `[kv_heads, tokens, head_dim]` to `[2, tokens, channels]`, padded with zeros, which take no
    bits."""
    flat = [side.transpose(0, 1).flatten(1) for side in kv]
    if all(side.shape[1] == channels for side in flat):
        return torch.stack(flat)
    return torch.stack([torch.nn.functional.pad(side, (0, channels - side.shape[1])) for side in flat])


def heads_of(sides: torch.Tensor, shape: Shape) -> LayerKV:
    """View sides `[2, tokens, channels]` as keys and values: inverse of `wide_sides`."""
    keys, values = (
        side[:, : heads * head_dim].unflatten(1, (heads, head_dim)).transpose(0, 1)
        for side, (heads, _, head_dim) in zip(sides, side_shapes(shape), strict=True)
    )
    return keys, values


def no_profiles(digest: bytes) -> Profile:
    raise DamagedError(f"the codec profile {digest.hex()} is not there")


@dataclass(frozen=True, slots=True)
class Encoded:
    payload: Payload
    shape: Shape
    dtype: str  # of the tensors before encoding
    base: Encoded | None = None  # the coarser level that this one refines

    def chain(self) -> Iterator[Encoded]:
        record: Encoded | None = self
        while record is not None:
            yield record
            record = record.base


class Codec(Protocol):
    """Turns one layer's keys and values `[kv_heads, tokens, head_dim]` to bytes and back; head_dim may differ.

    A class that inherits from this one is lossless and needs no other records, unless it says otherwise.
    """

    def encode_layers(self, kvs: Sequence[LayerKV], profile: Profile | None = None) -> Sequence[Sequence[Payload]]:
        """Encode all layers of a chunk, from the first on, each as the parts of a record."""
        ...

    def decode(
        self, items: Sequence[Encoded], layer: int = 0, profiles: Profiles = no_profiles, device: Device = None
    ) -> list[LayerKV]:
        """Decode several chunks at one layer, on `device` if the codec can. Raises DamagedError."""
        ...

    def decode_layers(self, items: Sequence[Encoded], profiles: Profiles = no_profiles) -> list[LayerKV]:
        """Decode all layers of a chunk, from the first on, in main memory. Raises DamagedError."""
        return [kv for layer, item in enumerate(items) for kv in self.decode([item], layer, profiles)]

    def stated_error(self, payload: Payload) -> tuple[float, float]:
        """Errors of K and of V: RMS of the difference over RMS. Raises DamagedError."""
        return 0.0, 0.0


class SelfContained(Codec):
    def __init__(self, level: str) -> None:
        self.level = level

    def decode(
        self, items: Sequence[Encoded], layer: int = 0, profiles: Profiles = no_profiles, device: Device = None
    ) -> list[LayerKV]:
        return [self.decode_one(item.payload, item.shape, item.dtype) for item in items]

    def decode_one(self, payload: Payload, shape: Shape, dtype: str) -> LayerKV:
        raise NotImplementedError
