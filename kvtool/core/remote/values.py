"""Each value of a store as it is sent and taken in again: sealed, with the digest that the store would give it."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvtool.core.cache import tables
from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry, dump_json, stated_size
from kvtool.core.cache.identity import HERE, ID_BYTES, ORIGIN
from kvtool.core.cache.identity import chunk_id as chunk_id_of
from kvtool.core.cache.record import Kind, decode_record, seal, unseal
from kvtool.core.cache.store import Store
from kvtool.core.errors import DamagedError
from kvtool.core.remote import checks
from kvtool.core.remote.entries import digest_of
from kvtool.core.remote.limits import MOST_TOKENS

# What a store says of itself, by the name of its value.
META: Mapping[str, Callable[[Store], dict[str, Any]]] = {
    "manifest": lambda store: {key: value for key, value in store.manifest().items() if key != ORIGIN},
    "codec": Store.codec_state,
}
_LENGTH = struct.Struct("<Q")
_SEPARATOR = re.compile(r"[/\\]")  # of whatever system the file was ingested on


def meta_value(store: Store, name: str) -> bytes:
    """Return the sealed value of a name in `META`."""
    return sealed_meta(name, META[name](store))


def sealed_meta(name: str, value: Mapping[str, Any]) -> bytes:
    """Seal a value at hand as the one of a name in `META`."""
    return seal(name.encode(), Kind.MANIFEST, dump_json(value))


def open_meta(name: str, value: bytes) -> dict[str, Any]:
    """Inverse of :func:`meta_value`; raises DamagedError."""
    try:
        meta = checks.strict_json(unseal(name.encode(), Kind.MANIFEST, value))
        return _CHECKS[name](meta)
    except ValueError as error:
        raise DamagedError(f"{name} cannot be read: {error}") from error


def _manifest_of(value: Any) -> dict[str, Any]:
    manifest: dict[str, Any] = checks.plain(checks.object_of(value))
    checks.identity_of(manifest.get("identity", {}))
    return manifest


_CHECKS = {"manifest": _manifest_of, "codec": checks.codec_of}


def file_value(store: Store, entry: FileEntry) -> bytes:
    """A file's entry and its documents, as they are stored but for their origin. Raises DamagedError where one of them
    is lost."""
    parts: list[bytes | memoryview] = [replace(entry, origin=HERE).to_bytes()]
    for source in entry.documents:
        document = store.document_bytes(source)
        if document is None:
            raise DamagedError(f"the document {source} is lost")
        parts.append(document)
    payload = b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))
    return seal(tables.name_key(entry.path), Kind.FILE, payload)


def open_file(key: bytes, value: bytes) -> tuple[FileEntry, list[DocumentEntry]]:
    """Inverse of :func:`file_value`; raises DamagedError."""
    parts = _parts_of_file(key, value)
    return _checked_file(key, FileEntry.from_bytes(parts[0]), [DocumentEntry.from_bytes(part) for part in parts[1:]])


def unpacked_size(key: bytes, value: bytes) -> int:
    """Return the bytes that a file's entry and its documents state to have unpacked. Raises DamagedError."""
    return sum(map(stated_size, _parts_of_file(key, value)))


def _parts_of_file(key: bytes, value: bytes) -> list[memoryview]:
    payload, parts, at = unseal(key, Kind.FILE, value), list[memoryview](), 0
    while at < len(payload):
        if len(payload) - at < _LENGTH.size:
            raise DamagedError("a file's value is cut off")
        (length,) = _LENGTH.unpack_from(payload, at)
        at += _LENGTH.size
        parts.append(payload[at : at + length])
        at += length
    if at != len(payload) or not parts:
        raise DamagedError("a file's value is cut off")
    return parts


def _checked_file(
    key: bytes, entry: FileEntry, documents: list[DocumentEntry]
) -> tuple[FileEntry, list[DocumentEntry]]:
    """The file and its documents, if it is the file that was asked for and its chunks lie within its documents."""
    sources = [document.source for document in documents]
    if tables.name_key(entry.path) != key or len(set(sources)) != len(sources) or set(sources) != set(entry.documents):
        raise DamagedError("another file, or other documents than it names, stand in its place")
    if "\0" in entry.path or not {".", ".."}.isdisjoint(_SEPARATOR.split(entry.path)):
        raise DamagedError("its path is none that an ingest gives a file")
    if any(source != entry.path and not source.startswith(f"{entry.path}#") for source in sources):
        raise DamagedError("one of its documents is another file's")
    if not (0 <= entry.size <= checks.INT64 and abs(entry.mtime_ns) <= checks.INT64):
        raise DamagedError("a file's size or time is out of bounds")
    for document in documents:
        named = 0
        for ref in document.chunks:
            if len(ref.chunk_id) != ID_BYTES or not 0 <= ref.start <= ref.end <= len(document.text):
                raise DamagedError(f"a chunk lies outside of the document {document.source}")
            named += ref.end - ref.start
            if not 0 <= ref.tokens <= MOST_TOKENS:
                raise DamagedError(f"a chunk of {document.source} has a number of tokens that none can have")
        if named > len(document.text):  # each would be copied and looked through: a few bytes would take gigabytes
            raise DamagedError(f"chunks of {document.source} overlap")
    return entry, documents


def chunk_value(chunk_id: bytes, info: ChunkInfo) -> bytes:
    """A chunk's description."""
    return seal(chunk_id, Kind.CHUNK, info.to_bytes())


def open_chunk(chunk_id: bytes, value: bytes, identity: Mapping[str, Any], layers: int) -> ChunkInfo:
    """Inverse of :func:`chunk_value`.

    Parameters
    ----------
    identity : of the store that it belongs to: a chunk's id is a digest of that, its lead-in and its token ids.
    layers : that it has to have.

    Raises
    ------
    DamagedError : it cannot be read, or describes another chunk.
    """
    info = ChunkInfo.from_bytes(unseal(chunk_id, Kind.CHUNK, value))
    described = chunk_id_of(
        namespace=identity.get("namespace", ""),
        model_fingerprint=identity.get("fingerprint", ""),
        lead_in=info.lead_in,
        token_ids=info.token_ids,
    )
    if described != chunk_id or info.layers != layers:
        raise DamagedError("it describes another chunk")
    return info


def profile_value(store: Store, digest: str) -> bytes:
    """A codec profile; raises DamagedError."""
    key = bytes.fromhex(digest)
    data = store.profile(key)
    if data is None:
        raise DamagedError(f"the codec profile {digest} is lost")
    return seal(key, Kind.PROFILE, data)


def open_profile(digest: str, value: bytes) -> bytes:
    """Inverse of :func:`profile_value`; raises DamagedError."""
    key = bytes.fromhex(digest)
    data = bytes(unseal(key, Kind.PROFILE, value))
    if hashlib.blake2b(data, digest_size=len(key)).digest() != key:
        raise DamagedError("another profile stands in its place")
    return data


def is_sound(name: str, value: bytes) -> bool:
    """Return True if a value is one that its name can mean: every byte is covered by a digest."""
    kind, _, rest = name.partition("/")
    try:
        if kind == "kv":
            chunk, level, layer = rest.split("/")
            header, _ = decode_record(bytes.fromhex(chunk), value)
            return (header.level, header.layer) == (level.rpartition("-")[0], int(layer))
        if kind == "profile":
            open_profile(rest, value)
            return True
    except (DamagedError, ValueError):
        return False
    return digest_of(value) == rest.rpartition("-")[2]
