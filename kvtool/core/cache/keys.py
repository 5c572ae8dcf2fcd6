"""Keys of the tables. LMDB keys end at 511 bytes, so names of any length go in as digests."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.record import Bytes, Kind, check_level, seal, unseal
from kvtool.core.errors import DamagedError

STORE_KEY, MANIFEST_KEY, REVISION_KEY, CODEC_KEY = b"store", b"manifest", b"revision", b"codec"
BUDGET_KEY, PINS_KEY = b"budget", b"pins"
COLLECTED_KEY = b"collected"  # the revision of documents at which what nothing refers to was dropped last
UNFINISHED_KEY = b"unfinished"  # files of which an ingest has stored some chunks, with the ids of all of them
DOCUMENTS_KEY = b"counted"  # revisions at which documents changed, and chunks were dropped, last; its own beside them
_NUMBER = struct.Struct("<Q")
_LEVEL_ROW = struct.Struct("<IIQ")


def name_key(name: str) -> bytes:
    """Key of a file or a document."""
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=ID_BYTES, person=b"kvtool name").digest()


def mark_of(data: Bytes) -> bytes:
    """16 bytes that tell a stored value from another one."""
    return hashlib.blake2b(data, digest_size=16).digest()


def level_key(chunk_id: bytes, level: str) -> bytes:
    """Key of the row that says: all layers of this chunk are stored at this level."""
    return check_chunk_id(chunk_id) + check_level(level).encode("ascii")


def record_key(chunk_id: bytes, level: str, layer: int) -> bytes:
    """Key of one KV record. The level's length stands before it, so "1" is no prefix of "10"."""
    name = check_level(level).encode("ascii")
    return check_chunk_id(chunk_id) + bytes([len(name)]) + name + struct.pack(">H", layer)


def split_record_key(key: bytes) -> tuple[bytes, str, int]:
    """Chunk id, level and layer of a record key; raises DamagedError."""
    level = key[ID_BYTES + 1 : -2]
    if len(key) < ID_BYTES + 4 or key[ID_BYTES] != len(level):
        raise DamagedError("a record key is damaged")
    return key[:ID_BYTES], level.decode("ascii", "replace"), struct.unpack(">H", key[-2:])[0]


def check_chunk_id(chunk_id: bytes) -> bytes:
    """The id, if it is one; raises ValueError."""
    if len(chunk_id) != ID_BYTES:
        raise ValueError(f"a chunk id has {ID_BYTES} bytes, not {len(chunk_id)}")
    return bytes(chunk_id)


def seal_number(key: bytes, value: int) -> bytes:
    """A counter or a time in the envelope."""
    return seal(key, Kind.NUMBER, _NUMBER.pack(value))


def unseal_number(key: bytes, data: Bytes) -> int:
    """Inverse of :func:`seal_number`; raises DamagedError."""
    payload = unseal(key, Kind.NUMBER, data)
    if payload.nbytes != _NUMBER.size:
        raise DamagedError("a stored number has the wrong size")
    return int(_NUMBER.unpack(payload)[0])


@dataclass(frozen=True, slots=True)
class LevelRow:
    """A chunk at a level, complete: layers, tokens, bytes of its records."""

    layers: int
    tokens: int
    size: int

    def seal(self, key: bytes) -> bytes:
        """The row in the envelope."""
        return seal(key, Kind.LEVEL, _LEVEL_ROW.pack(self.layers, self.tokens, self.size))

    @classmethod
    def unseal(cls, key: bytes, data: Bytes) -> LevelRow:
        """Inverse of :meth:`seal`; raises DamagedError."""
        payload = unseal(key, Kind.LEVEL, data)
        if payload.nbytes != _LEVEL_ROW.size:
            raise DamagedError("a level row has the wrong size")
        return cls(*_LEVEL_ROW.unpack(payload))
