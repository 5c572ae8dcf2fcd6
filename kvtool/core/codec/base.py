"""What a codec is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from kvtool.core.codec.profile import Profile

Payload = bytes | bytearray | memoryview
LayerKV: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # one layer's keys and values
# [kv_heads, tokens, head_dim] of K and of V; and then V's head_dim, where it is another one than K's.
Shape: TypeAlias = "tuple[int, int, int] | tuple[int, int, int, int]"
SideShape: TypeAlias = "tuple[int, int, int]"
Profiles = Callable[[bytes], "Profile"]  # by digest; raises DamagedError where there is none


def shape_of(kv_heads: int, tokens: int, key_dim: int, value_dim: int) -> Shape:
    """The one shape of both sides."""
    return (kv_heads, tokens, key_dim) if key_dim == value_dim else (kv_heads, tokens, key_dim, value_dim)


def shape_of_layer(kv: LayerKV) -> Shape:
    """The shape of a layer's keys and values."""
    keys, values = kv
    return shape_of(keys.shape[0], keys.shape[1], keys.shape[2], values.shape[2])


def side_shapes(shape: Shape) -> tuple[SideShape, SideShape]:
    """The shape of K and that of V."""
    kv_heads, tokens, key_dim = shape[:3]
    return (kv_heads, tokens, key_dim), (kv_heads, tokens, shape[-1])


def no_profiles(digest: bytes) -> Profile:
    """The lookup of one who has no profiles."""
    from kvtool.core.errors import DamagedError

    raise DamagedError(f"the codec profile {digest.hex()} is not there")


@dataclass(frozen=True, slots=True)
class Encoded:
    """One layer of one chunk as stored.

    Attributes
    ----------
    shape : of K and V.
    dtype : what the tensors were before encoding.
    base : the coarser level that this one refines.
    """

    payload: Payload
    shape: Shape
    dtype: str
    base: Encoded | None = None

    def chain(self) -> Iterator[Encoded]:
        """This record, the one that it refines, and so on."""
        record: Encoded | None = self
        while record is not None:
            yield record
            record = record.base


class Codec(Protocol):
    """Turns one layer's keys and values `[kv_heads, tokens, head_dim]` into bytes and back; head_dim may differ.

    What else there is to know of its level says `Level` (levels.py).
    """

    def encode(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int = 0, profile: Profile | None = None
    ) -> Sequence[Payload]: ...

    def encode_layers(self, kvs: Sequence[LayerKV], profile: Profile | None = None) -> Sequence[Sequence[Payload]]:
        """Encode all layers of a chunk, from the first on: what `encode` makes of each."""
        ...

    def decode(
        self,
        items: Sequence[Encoded],
        layer: int = 0,
        profiles: Profiles = no_profiles,
        device: torch.device | None = None,
    ) -> list[LayerKV]:
        """Keys and values of several chunks at one layer. Raises DamagedError.

        Parameters
        ----------
        device : a codec that can decodes there; without one, and by the others, they are left in main memory.
        """
        ...

    def decode_layers(self, items: Sequence[Encoded], profiles: Profiles = no_profiles) -> list[LayerKV]:
        """Keys and values of all layers of a chunk, from the first on, in main memory. Raises DamagedError."""
        ...

    def base_of(self, payload: Payload) -> str | None:
        """The level whose record is needed too. Raises DamagedError."""
        ...

    def stated_error(self, payload: Payload) -> tuple[float, float]:
        """What a record says that it lost, of K and of V: RMS of the difference over RMS. Raises DamagedError."""
        ...


class SelfContained:
    """A codec whose records stand alone and are decoded one by one; lossless, unless it states another error."""

    def __init__(self, level: str) -> None:
        self.level = level

    def encode(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int = 0, profile: Profile | None = None
    ) -> Sequence[Payload]:
        """The parts of one layer's record."""
        raise NotImplementedError

    def encode_layers(self, kvs: Sequence[LayerKV], profile: Profile | None = None) -> Sequence[Sequence[Payload]]:
        """Encode all layers of a chunk, one by one."""
        return [self.encode(keys, values, layer, profile) for layer, (keys, values) in enumerate(kvs)]

    def decode(
        self,
        items: Sequence[Encoded],
        layer: int = 0,
        profiles: Profiles = no_profiles,
        device: torch.device | None = None,
    ) -> list[LayerKV]:
        """Keys and values of several chunks at one layer, in main memory. Raises DamagedError."""
        return [self.decode_one(item.payload, item.shape, item.dtype) for item in items]

    def decode_layers(self, items: Sequence[Encoded], profiles: Profiles = no_profiles) -> list[LayerKV]:
        """Keys and values of all layers of a chunk, one by one. Raises DamagedError."""
        return self.decode(items)

    def decode_one(self, payload: Payload, shape: Shape, dtype: str) -> LayerKV:
        """Keys and values of one layer of one chunk."""
        raise NotImplementedError

    def base_of(self, payload: Payload) -> str | None:
        """No other record is needed."""
        return None

    def stated_error(self, payload: Payload) -> tuple[float, float]:
        """Nothing is lost."""
        return 0.0, 0.0
