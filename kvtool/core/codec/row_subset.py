"""Row subsets, levels `keepNN-…`: a part of a chunk's rows, stored as another level stores all of them.

The inner level's payload of the stored rows comes first. Then follow a bit for every token of the chunk, 1 where its
row is stored, the first the lowest; and `_TAIL`: tokens of the chunk, rows that are stored, ``kvk`` and the format.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np

from kvtool.core import codec
from kvtool.core.codec.base import (
    DTYPES,
    Codec,
    Device,
    Encoded,
    LayerKV,
    Payload,
    Profiles,
    no_profiles,
    shape_of,
    side_shapes,
)
from kvtool.core.codec.levels import level_of
from kvtool.core.codec.profile import Profile
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError

_TAIL = struct.Struct("<II4s")
_MAGIC = b"kvk\1"


class RowSubset(Codec):
    """A level that stores only some rows. All given rows are encoded as those of a chunk that has no others."""

    def __init__(self, level: str) -> None:
        self.level = level

    @property
    def _inner(self) -> Codec:
        return codec.CODECS[level_of(self.level).inner]

    def encode_layers(self, kvs: Sequence[LayerKV], profile: Profile | None = None) -> Sequence[Sequence[Payload]]:
        made, tokens = self._inner.encode_layers(kvs, profile), kvs[0][0].shape[1]
        return [[*parts, tail_of(range(tokens), tokens)] for parts in made]

    def decode(
        self, items: Sequence[Encoded], layer: int = 0, profiles: Profiles = no_profiles, device: Device = None
    ) -> list[LayerKV]:
        return self._inner.decode([self._of_inner(item)[0] for item in items], layer, profiles, device)

    def decode_layers(self, items: Sequence[Encoded], profiles: Profiles = no_profiles) -> list[LayerKV]:
        """Raises DamagedError: the layers do not hold the same rows."""
        opened = [self._of_inner(item) for item in items]
        if len({rows for _, rows in opened}) > 1:
            raise DamagedError("the layers of a chunk hold different rows")
        return self._inner.decode_layers([item for item, _ in opened], profiles)

    def stated_error(self, payload: Payload) -> tuple[float, float]:
        return self._inner.stated_error(_split(payload)[0])

    def _of_inner(self, item: Encoded) -> tuple[Encoded, Ids]:
        """The rows as the inner level stores them, and their numbers. Raises DamagedError."""
        inner, rows = _opened(item)
        size = sum(map(math.prod, side_shapes(inner.shape))) * DTYPES[inner.dtype].itemsize
        if level_of(level_of(self.level).inner).verbatim and len(inner.payload) != size:
            raise DamagedError(f"{len(inner.payload)} bytes do not fit {len(rows)} rows, which need {size}")
        return inner, rows


def tail_of(rows: Sequence[int], tokens: int) -> bytes:
    bits = np.zeros(tokens, np.uint8)
    bits[list(rows)] = 1
    return np.packbits(bits, bitorder="little").tobytes() + _TAIL.pack(tokens, len(rows), _MAGIC)


def rows_of(item: Encoded) -> Ids:
    """The tokens of a chunk whose rows a record holds, ascending. Raises DamagedError."""
    return _opened(item)[1]


def inner_of(item: Encoded) -> Encoded:
    return _opened(item)[0]


def _split(payload: Payload) -> tuple[memoryview, memoryview, int, int]:
    """The inner payload, the bits, and the numbers of tokens and of rows."""
    view = memoryview(payload)
    if len(view) < _TAIL.size:
        raise DamagedError("a record of some of a chunk's rows does not say of which")
    tokens, count, magic = _TAIL.unpack_from(view, len(view) - _TAIL.size)
    start = len(view) - _TAIL.size - -(-tokens // 8)
    if magic != _MAGIC or start < 0:
        raise DamagedError("a record of some of a chunk's rows does not say of which")
    return view[:start], view[start : -_TAIL.size], tokens, count


def _opened(item: Encoded) -> tuple[Encoded, Ids]:
    payload, packed, tokens, count = _split(item.payload)
    kv_heads, stated, key_dim = item.shape[:3]
    if tokens != stated:
        raise DamagedError("a record of some rows of a chunk of another length")
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    rows = tuple(bits[:tokens].nonzero()[0].tolist())
    if len(rows) != count or bits[tokens:].any():
        raise DamagedError("a record does not hold as many rows as it says")
    if tokens and not rows:  # its place in a prompt would be that of the next chunk
        raise DamagedError("a record holds no row of its chunk")
    return Encoded(payload, shape_of(kv_heads, count, key_dim, item.shape[-1]), item.dtype), rows
