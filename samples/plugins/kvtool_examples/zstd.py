"""A codec: the model's own numbers in Zstandard, low and high bytes separate. Lossless; no record needs another."""

from __future__ import annotations

import math
from typing import Any

import torch
import zstandard

from kvtool.core.codec.base import DTYPES, LayerKV, Payload, SelfContained, Shape, side_shapes
from kvtool.core.errors import DamagedError

_VERSION = b"Z1"


class Zstd(SelfContained):
    """`Z1`, then one frame: the bytes of all numbers of K and V, all first bytes before all second ones."""

    def encode(self, keys: torch.Tensor, values: torch.Tensor, layer: int = 0, profile: Any = None) -> list[Payload]:
        numbers = torch.cat([side.reshape(-1) for side in (keys, values)])
        planes = numbers.view(torch.uint8).reshape(-1, numbers.element_size()).T.contiguous()
        return [_VERSION, zstandard.ZstdCompressor(level=3).compress(planes.numpy().data)]

    def decode_one(self, payload: Payload, shape: Shape, dtype: str) -> LayerKV:
        of_keys, of_values = side_shapes(shape)
        size = DTYPES[dtype].itemsize
        wanted = (math.prod(of_keys) + math.prod(of_values)) * size
        planes = torch.frombuffer(bytearray(_unpacked(bytes(payload), wanted)), dtype=torch.uint8)
        flat = planes.reshape(size, -1).T.contiguous().reshape(-1).view(DTYPES[dtype])
        keys, values = flat.split([math.prod(of_keys), math.prod(of_values)])
        return keys.view(of_keys), values.view(of_values)


def _unpacked(payload: bytes, wanted: int) -> bytes:
    """The bytes of a frame, exactly as many as a record of this shape has: what it says of itself is not believed."""
    if not payload.startswith(_VERSION):
        raise DamagedError("a record at level zstd is of another version")
    try:
        data = zstandard.ZstdDecompressor().decompress(payload[2:], max_output_size=wanted)
    except zstandard.ZstdError as error:
        raise DamagedError(f"a record at level zstd cannot be unpacked: {error}") from error
    if len(data) != wanted:
        raise DamagedError("a record at level zstd is of another length")
    return data
