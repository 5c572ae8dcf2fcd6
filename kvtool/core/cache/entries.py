"""Entries of a store besides KV: files, documents, chunks, as frozen values with one byte form each."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import zstandard

from kvtool.core.cache.identity import HERE, Origin, origin_of
from kvtool.core.common.machine import DEVICE_KINDS, NUMBER_FORMATS, Arithmetic
from kvtool.core.common.marks import Mark, Place, place_of
from kvtool.core.common.text import parsed
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError

MAX_ENTRY_BYTES = 2**30  # an entry never unpacks to more, whatever its frame claims
_PACKED, _PLAIN = b"z", b"j"
_PACK_FROM = 512  # shorter JSON is stored as it is


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """A document's chunk: its characters ``[start, end)`` in the document, and its length in tokens."""

    chunk_id: bytes
    start: int
    end: int
    tokens: int


@dataclass(frozen=True, slots=True)
class DocumentEntry:
    source: str
    kind: str
    text: str
    chunks: tuple[ChunkRef, ...]
    marks: tuple[Mark, ...] = ()

    def to_bytes(self) -> bytes:
        chunks = [[ref.chunk_id.hex(), ref.start, ref.end, ref.tokens] for ref in self.chunks]
        marks = {"marks": [[mark.start, mark.place] for mark in self.marks]} if self.marks else {}
        return _pack({"source": self.source, "kind": self.kind, "text": self.text, "chunks": chunks} | marks)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> DocumentEntry:
        with reading("document"):
            value = _unpack(data)
            chunks = tuple(ChunkRef(bytes.fromhex(i), int(s), int(e), int(n)) for i, s, e, n in value["chunks"])
            marks = tuple(Mark(int(start), _of_kind(position, int | str)) for start, position in value.get("marks", ()))
            return cls(_of_kind(value["source"]), _of_kind(value["kind"]), _of_kind(value["text"]), chunks, marks)

    def place(self, start: int, end: int) -> Place:
        return place_of(self.text, self.marks, start, end)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file as last ingested, and its documents by their sources. `settings`: digest of the ingest settings that
    matter for its chunks. `notes`: what the reader skipped or replaced, for people. `origin`: of the entry and its
    documents."""

    path: str
    size: int
    mtime_ns: int
    digest: str
    settings: str
    documents: tuple[str, ...]
    notes: tuple[str, ...] = ()
    origin: Origin = HERE

    def to_bytes(self) -> bytes:
        value = {name: getattr(self, name) for name in self.__slots__ if name != "origin"}
        return _pack(value | ({} if self.origin == HERE else {"origin": self.origin.to_json()}))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> FileEntry:
        with reading("file entry"):
            value = _unpack(data)
            path, digest, settings = (_of_kind(value[name]) for name in ("path", "digest", "settings"))
            documents, notes = (tuple(map(_of_kind, value[name])) for name in ("documents", "notes"))
            size, mtime_ns = int(value["size"]), int(value["mtime_ns"])
            return cls(path, size, mtime_ns, digest, settings, documents, notes, origin_of(value.get("origin")))


_CHUNK = struct.Struct("<IIII")  # token ids, lead-in bytes, layers, sensitivity bytes
# As on disk: the places of the names count, from 1.
_DTYPES, _DEVICES = ({name: code for code, name in enumerate(names, 1)} for names in (NUMBER_FORMATS, DEVICE_KINDS))
_ARITHMETICS = {bytes([_DTYPES[a], _DEVICES[b]]): Arithmetic(a, b) for a, b in product(_DTYPES, _DEVICES)}


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """A chunk: its ids (compared on every hit), its lead-in's digest, and its layers. `sensitivity`: one little-endian
    float16 a token, how much its values depend on the text before; or empty. `arithmetic`: None for a model that keeps
    states."""

    token_ids: Ids
    lead_in: bytes
    layers: int
    sensitivity: bytes = b""
    arithmetic: Arithmetic | None = None

    def __post_init__(self) -> None:
        if self.sensitivity and len(self.sensitivity) != 2 * len(self.token_ids):
            raise ValueError("sensitivity needs two bytes a token")

    def to_bytes(self) -> bytes:
        head = _CHUNK.pack(len(self.token_ids), len(self.lead_in), self.layers, len(self.sensitivity))
        tail = bytes([_DTYPES[self.arithmetic.dtype], _DEVICES[self.arithmetic.device]]) if self.arithmetic else b""
        ids = struct.pack(f"<{len(self.token_ids)}I", *self.token_ids)
        return head + ids + self.lead_in + self.sensitivity + tail

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> ChunkInfo:
        with reading("chunk"):
            count, lead_bytes, layers, side_bytes = _CHUNK.unpack_from(data)
            lead_at = _CHUNK.size + 4 * count
            side_at, end = lead_at + lead_bytes, lead_at + lead_bytes + side_bytes
            if end > len(data):
                raise ValueError("sizes do not fit")
            ids = struct.unpack_from(f"<{count}I", data, _CHUNK.size)
            arithmetic = _ARITHMETICS[bytes(data[end:])] if end < len(data) else None
            return cls(ids, bytes(data[lead_at:side_at]), layers, bytes(data[side_at:end]), arithmetic)


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """A chunk to make records of. `before`: token ids between the store's lead-in and this chunk (the lead-in
    `neighbour`); `lead_in`: digest of all token ids before the chunk in its prefill."""

    chunk_id: bytes
    ids: Ids
    before: Ids
    lead_in: bytes

    def info(self, layers: int, sensitivity: bytes = b"", arithmetic: Arithmetic | None = None) -> ChunkInfo:
        return ChunkInfo(self.ids, self.lead_in, layers, sensitivity, arithmetic)


_TROUBLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, struct.error, zstandard.ZstdError)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise DamagedError for what goes wrong while a stored value is read."""
    try:
        yield
    except _TROUBLE as error:
        raise DamagedError(f"a stored {what} cannot be read: {type(error).__name__}") from error


def _of_kind(value: Any, kinds: Any = str) -> Any:
    if not isinstance(value, kinds):
        raise TypeError("not of its kind")
    return value


def dump_json(value: Any) -> bytes:
    """Canonical JSON: sorted, no spaces, UTF-8; lone surrogates (file names) survive."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "surrogatepass")


def load_json(data: bytes | memoryview) -> Any:
    return parsed(bytes(data).decode("utf-8", "surrogatepass"))


def _pack(value: dict[str, Any]) -> bytes:
    plain = dump_json(value)
    if len(plain) > MAX_ENTRY_BYTES:
        raise ValueError("an entry of the store is over 1 GiB")
    if len(plain) < _PACK_FROM:
        return _PLAIN + plain
    # Without write_checksum a flipped byte inside a frame decodes to something else in silence.
    return _PACKED + zstandard.ZstdCompressor(level=3, write_checksum=True, write_content_size=True).compress(plain)


def stated_size(data: bytes | memoryview) -> int:
    with reading("entry"):
        return _stated(data[1:]) if bytes(data[:1]) == _PACKED else len(data)


def _stated(body: bytes | memoryview) -> int:
    stated = zstandard.frame_content_size(body)
    if not 0 <= stated <= MAX_ENTRY_BYTES:
        raise ValueError("the packed size is out of bounds")
    return int(stated)


def _unpack(data: bytes | memoryview) -> dict[str, Any]:
    form, body = bytes(data[:1]), data[1:]
    if form == _PACKED:
        # max_output_size is ignored when the frame states a size: look at what it states first.
        stated = _stated(body)
        body = zstandard.ZstdDecompressor().decompress(body, max_output_size=stated or 1)
    elif form != _PLAIN:
        raise ValueError("unknown form")
    value = load_json(body)
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return value
