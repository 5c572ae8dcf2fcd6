"""Lossless codecs: level `raw`, the model's own numbers, and level `lossless`, about two thirds of them."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from kvtool.core.codec.base import DTYPES, LayerKV, Payload, SelfContained, Shape, SideShape, side_shapes
from kvtool.core.errors import DamagedError

_LENGTHS = struct.Struct("<2I")
_WORDS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_ZSTD_LEVEL = 1  # level 19 takes 2 % off the whole record (smollm2) and far longer


class Raw(SelfContained):
    """K then V, each `[kv_heads, tokens, head_dim]` in C order, little-endian (law 7: bit for bit)."""

    def encode_layers(self, kvs: Sequence[LayerKV], profile: object = None) -> list[list[memoryview]]:
        return [self.encode(*kv) for kv in kvs]

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> list[memoryview]:
        """The bytes may be views."""
        return [side.contiguous().view(torch.uint8).numpy().reshape(-1).data for side in (keys, values)]

    def decode_one(self, payload: Payload, shape: Shape, dtype: str) -> LayerKV:
        """Views of `payload`, which must not be written to. Raises DamagedError."""
        of_keys, of_values = side_shapes(shape)
        kind = DTYPES[dtype]
        flat = torch.frombuffer(payload, dtype=kind) if len(payload) else torch.empty(0, dtype=kind)
        keys, values = flat.split_with_sizes([math.prod(of_keys), math.prod(of_values)])
        return _viewed(keys, of_keys), _viewed(values, of_values)


class Lossless(SelfContained):
    """Compressed exponents: these are few, while signs and mantissas are noise (`kvtool help codec` has the bytes).

    Every number is rotated left by one bit, so that its first byte holds the exponent (of float16: and three bits more)
    and the sign is the last of the mantissa's bits. First bytes are compressed by zstd, K's and then V's; the other
    bytes follow, number by number, low byte first.
    """

    def encode_layers(self, kvs: Sequence[LayerKV], profile: object = None) -> list[list[Payload]]:
        return [self.encode(*kv) for kv in kvs]

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> list[Payload]:
        compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        sides = [_rotated(side) for side in (keys, values)]
        first = [compressor.compress(np.ascontiguousarray(side[:, -1]).data) for side in sides]
        rest = [np.ascontiguousarray(side[:, :-1]).reshape(-1).data for side in sides]
        return [_LENGTHS.pack(*map(len, first)), *first, *rest]

    def decode_one(self, payload: Payload, shape: Shape, dtype: str) -> LayerKV:
        """Raises DamagedError: lengths do not fit the shape, or a part cannot be decompressed."""
        view = memoryview(payload)
        width, shapes = DTYPES[dtype].itemsize, side_shapes(shape)
        counts = [math.prod(side) for side in shapes]
        if len(view) < _LENGTHS.size:
            raise DamagedError("a lossless payload without its lengths")
        lengths = _LENGTHS.unpack_from(view)
        if len(view) != _LENGTHS.size + sum(lengths) + sum(counts) * (width - 1):
            raise DamagedError("a lossless payload whose parts do not fit its shape")
        sides = []
        at, rest = _LENGTHS.size, _LENGTHS.size + sum(lengths)
        for length, count, side in zip(lengths, counts, shapes, strict=True):
            first = _decompressed(view[at : at + length], count)
            others = np.frombuffer(view, np.uint8, count * (width - 1), rest).reshape(count, width - 1)
            sides.append(_viewed(_rotated_back(first, others, dtype), side))
            at, rest = at + length, rest + count * (width - 1)
        keys, values = sides
        return keys, values


def _viewed(numbers: torch.Tensor, shape: SideShape) -> torch.Tensor:
    try:
        return numbers.view(shape)
    except RuntimeError as error:  # of no heads, but tokens and dimensions by the billion
        raise DamagedError("a payload of a shape that cannot be") from error


def _rotated(side: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Bytes of the rotated numbers, `[numbers, bytes]`, low byte first."""
    width = side.element_size()
    words = side.contiguous().view(torch.uint8).numpy().reshape(-1).view(_WORDS[width])
    return ((words << 1) | (words >> (8 * width - 1))).view(np.uint8).reshape(-1, width)


def _rotated_back(first: npt.NDArray[np.uint8], others: npt.NDArray[np.uint8], dtype: str) -> torch.Tensor:
    """Make numbers of their first bytes and the others `[numbers, bytes]`, low byte first.

    They are put together as whole words: bytes that are written one by one take three times as long.
    """
    width = 1 + others.shape[1]
    words = first.astype(_WORDS[width])
    for byte in reversed(range(width - 1)):
        words <<= 8
        words |= others[:, byte]
    signs = words << (8 * width - 1)
    words >>= 1
    words |= signs
    return torch.from_numpy(words.view(np.uint8)).view(DTYPES[dtype])


def _decompressed(frame: memoryview, size: int) -> npt.NDArray[np.uint8]:
    """No more memory than `size` bytes is taken, whatever the frame claims."""
    try:
        if zstandard.frame_content_size(frame) != size:
            raise DamagedError("a lossless payload whose exponents do not fit its shape")
        data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedError(f"a lossless payload that cannot be decompressed: {error}") from error
    return np.frombuffer(data, np.uint8)
