"""The one envelope of every value in the store: a 64-byte header, the payload, a digest over key, header and payload.

=======  ====  =======================================================
offset   type  field
=======  ====  =======================================================
0        4s    magic ``kvr`` and a zero byte
4        B     record format version
5        B     kind (:class:`Kind`)
6        B     dtype code (KV records; else 0)
7        B     0
8        16s   level, ASCII, zero-padded (KV records; else zeros)
24       I     layer
28       I     kv_heads
32       I     tokens
36       I     head_dim of K
40       I     head_dim of V
44       I     0
48       Q     payload length in bytes
56       Q     0
64       …     payload
64 + n   16s   xxh3-128 over len(key) ‖ key ‖ header ‖ payload
=======  ====  =======================================================

All integers are little-endian. LMDB itself has no checksum over values, and swapped pages exist: hence the key.
"""

from __future__ import annotations

import ctypes
import enum
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from kvtool.core.codec.levels import level_of
from kvtool.core.errors import DamagedError

RECORD_VERSION = 1
HEADER_BYTES = 64
DIGEST_BYTES = 16
OVERHEAD_BYTES = HEADER_BYTES + DIGEST_BYTES

_MAGIC = b"kvr\0"
_HEADER = struct.Struct("<4s4B16s6IQQ")
_DTYPE_CODES = {"bfloat16": 1, "float16": 2, "float32": 3}
_DTYPE_NAMES = {code: name for name, code in _DTYPE_CODES.items()}
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_LEVEL = re.compile(r"[A-Za-z0-9._+-]{1,16}", re.ASCII)
_MAX_COUNT = 2**32 - 1

Bytes = bytes | bytearray | memoryview
Allocator = Callable[[int], memoryview]  # memory for so many bytes: private, writable, on a 64-byte boundary
_ALIGN = 64


class Kind(enum.IntEnum):
    """Kind of a payload. The numbers are on disk: never reuse one."""

    KV = 1
    MANIFEST = 2
    FILE = 3
    DOCUMENT = 4
    CHUNK = 5
    LEVEL = 6
    NUMBER = 7
    STORE = 8
    PROFILE = 9
    STRETCH = 10
    PART = 11
    ORIGIN = 12


@dataclass(frozen=True, slots=True)
class KVHeader:
    """Header of a KV record: K ``[kv_heads, tokens, head_dim_k]`` and V ``[kv_heads, tokens, head_dim_v]`` of a layer.
    `dtype` is that of the tensors before encoding."""

    dtype: str
    kv_heads: int
    tokens: int
    head_dim_k: int
    head_dim_v: int
    level: str
    layer: int

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPE_CODES:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        check_level(self.level)
        for name in ("kv_heads", "tokens", "head_dim_k", "head_dim_v", "layer"):
            if not 0 <= getattr(self, name) <= _MAX_COUNT:
                raise ValueError(f"{name} is out of range")

    @property
    def raw_bytes(self) -> int:
        return self.kv_heads * self.tokens * (self.head_dim_k + self.head_dim_v) * _ITEM_BYTES[self.dtype]


def check_level(level: str) -> str:
    """Return the level's name. Raises ValueError: empty, too long, or with characters that keys do not have."""
    if not _LEVEL.fullmatch(level):
        raise ValueError(f"bad level name {level!r}")
    return level


def encode_record(key: bytes, header: KVHeader, payload: Sequence[Bytes]) -> bytes:
    """Encode a KV record as it is stored. `key` is the **chunk id**; the digest covers level and layer in the header,
    too. `payload`: parts, joined as they come; for level ``raw`` K then V, each ``[kv_heads, tokens, head_dim]`` in C
    order. Raises ValueError: a ``raw`` payload whose length is not that of its shape."""
    parts = [_flat(part) for part in payload]
    length = sum(part.nbytes for part in parts)
    if level_of(header.level).verbatim and length != header.raw_bytes:
        raise ValueError(f"a raw payload of this shape has {header.raw_bytes} bytes, not {length}")
    return _envelope(key, _pack_header(Kind.KV, length, header), parts)


def seal_room(key: bytes, header: KVHeader, room: memoryview) -> memoryview:
    """Make a `raw` record in the memory of its payload, with 64 bytes before it and 16 behind, without a copy. The
    memory must not change afterwards. Raises ValueError: a payload whose length is not that of its shape."""
    if room.nbytes != header.raw_bytes + OVERHEAD_BYTES:
        raise ValueError(f"a raw record of this shape has {header.raw_bytes + OVERHEAD_BYTES} bytes, not {room.nbytes}")
    room[:HEADER_BYTES] = _pack_header(Kind.KV, header.raw_bytes, header)
    room[-DIGEST_BYTES:] = _digest(key, [room[:-DIGEST_BYTES]])
    return room.toreadonly()


def decode_record(key: bytes, data: Bytes) -> tuple[KVHeader, memoryview]:
    """Return the header and payload, a view into `data`, of a KV record whose every byte has been checked. Raises
    DamagedError: truncated, other key, other version, a digest or a size that does not fit."""
    fields, payload = _open(key, data, Kind.KV)
    return _kv_header(fields), payload


def header_of(data: Bytes) -> KVHeader:
    """Read the header of a KV record, **without** checking the digest. Raises DamagedError."""
    return _kv_header(_parse_header(_flat(data), Kind.KV))


def payload_part(data: Bytes, part: slice) -> bytes:
    """Return a part of a value's payload, **without** checking the digest, from the value or its beginning."""
    return bytes(_flat(data)[HEADER_BYTES + part.start : HEADER_BYTES + part.stop])


def seal(key: bytes, kind: Kind, payload: Bytes) -> bytes:
    part = _flat(payload)
    return _envelope(key, _pack_header(kind, part.nbytes), [part])


def unseal(key: bytes, kind: Kind, data: Bytes) -> memoryview:
    return _open(key, data, kind)[1]


def _flat(data: Bytes) -> memoryview:
    view = memoryview(data)
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def _pack_header(kind: Kind, length: int, kv: KVHeader | None = None) -> bytes:
    if kv is None:
        return _HEADER.pack(_MAGIC, RECORD_VERSION, kind, 0, 0, b"", 0, 0, 0, 0, 0, 0, length, 0)
    shape = (kv.layer, kv.kv_heads, kv.tokens, kv.head_dim_k, kv.head_dim_v, 0)
    level = kv.level.encode("ascii")
    return _HEADER.pack(_MAGIC, RECORD_VERSION, kind, _DTYPE_CODES[kv.dtype], 0, level, *shape, length, 0)


def _digest(key: bytes, parts: Sequence[Bytes]) -> bytes:
    state = xxhash.xxh3_128(len(key).to_bytes(4, "little") + key)
    for part in parts:
        state.update(part)
    return state.digest()


def _envelope(key: bytes, header: bytes, parts: Sequence[memoryview]) -> bytes:
    return b"".join([header, *parts, _digest(key, [header, *parts])])


_Fields = tuple[int, bytes, int, int, int, int, int, int]  # dtype, level, layer, shape, payload bytes


def _parse_header(view: memoryview, kind: Kind) -> _Fields:
    if view.nbytes < OVERHEAD_BYTES:
        raise DamagedError(f"truncated: {view.nbytes} bytes are less than an empty record")
    magic, version, stated, dtype, zero, level, layer, heads, tokens, dim_k, dim_v, zero2, length, zero3 = (
        _HEADER.unpack_from(view)
    )
    if magic != _MAGIC:
        raise DamagedError("no record: its first bytes are wrong")
    if version != RECORD_VERSION:
        raise DamagedError(f"record version {version}, this kvtool reads {RECORD_VERSION}")
    if stated != kind:
        raise DamagedError(f"a record of kind {stated} where kind {int(kind)} belongs")
    if zero or zero2 or zero3:
        raise DamagedError("reserved header fields are not zero")
    if length != view.nbytes - OVERHEAD_BYTES:
        raise DamagedError(f"truncated or overlong: {view.nbytes - OVERHEAD_BYTES} payload bytes, {length} stated")
    return dtype, level, layer, heads, tokens, dim_k, dim_v, length


def _open(key: bytes, data: Bytes, kind: Kind) -> tuple[_Fields, memoryview]:
    view = _flat(data)
    fields = _parse_header(view, kind)
    covered, digest = view[:-DIGEST_BYTES], view[-DIGEST_BYTES:]
    if _digest(key, [covered]) != digest:
        raise DamagedError("the digest does not match: flipped bytes, or the record of another key")
    return fields, covered[HEADER_BYTES:]


@lru_cache  # records of one layer and length have the same
def _kv_header(fields: _Fields) -> KVHeader:
    code, level_bytes, layer, kv_heads, tokens, dim_k, dim_v, length = fields
    dtype = _DTYPE_NAMES.get(code)
    if dtype is None:
        raise DamagedError(f"unknown dtype code {code}")
    try:
        level = level_bytes.rstrip(b"\0").decode("ascii")
        header = KVHeader(dtype, kv_heads, tokens, dim_k, dim_v, level, layer)
    except ValueError as error:
        raise DamagedError("the record's level is no level") from error
    if level_of(level).verbatim and length != header.raw_bytes:
        raise DamagedError(f"{length} payload bytes do not fit the shape, which needs {header.raw_bytes}")
    return header


def aligned(size: int) -> memoryview:
    block = bytearray(size + _ALIGN)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % _ALIGN
    return memoryview(block)[start : start + size]
