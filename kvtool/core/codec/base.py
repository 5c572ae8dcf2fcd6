"""What a codec is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

Payload = bytes | bytearray | memoryview
Shape = tuple[int, int, int]


class Codec(Protocol):
    """Turns one layer's keys and values `[kv_heads, tokens, head_dim]` into bytes and back.

    Attributes
    ----------
    level : the name of the level it writes, as records carry it.
    lossless : decode(encode(x)) is x bit for bit.
    """

    level: str
    lossless: bool

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Sequence[Payload]: ...

    def decode(self, payload: Payload, shape: Shape, dtype: str) -> tuple[torch.Tensor, torch.Tensor]: ...
