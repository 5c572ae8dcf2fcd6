"""A local store seen as blobs: what its catalogue says, and each value as it is sent and taken in again."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtool.core.cache import keys
from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry, dump_json
from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.identity import chunk_id as chunk_id_of
from kvtool.core.cache.record import DIGEST_BYTES, Kind, decode_record, encode_record, seal, unseal
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import level_of, nested
from kvtool.core.codec.refines import base_level, check_of, stated_check
from kvtool.core.errors import DamagedError
from kvtool.core.remote import checks
from kvtool.core.remote.catalogue import Catalogue, Chunk, File, Level, digest_of
from kvtool.core.remote.limits import MOST_TOKENS

META = ("manifest", "codec", "lead-in")
_LENGTH = struct.Struct("<Q")
Damaged = Callable[[str, str], None]  # what, why


# ---- values, sealed: each with the digest that the local store would give it ----


def meta_value(store: Store, name: str) -> bytes:
    """One of `META`."""
    return sealed_meta(
        name, {"manifest": store.manifest, "codec": store.codec_state, "lead-in": store.lead_in_state}[name]()
    )


def sealed_meta(name: str, value: Mapping[str, Any]) -> bytes:
    """The same of a value at hand."""
    return seal(name.encode(), Kind.MANIFEST, dump_json(value))


def open_meta(name: str, value: bytes) -> dict[str, Any]:
    """Inverse of :func:`meta_value`; raises DamagedError."""
    try:
        found = checks.strict_json(unseal(name.encode(), Kind.MANIFEST, value))
        return _CHECKS[name](found)
    except ValueError as error:
        raise DamagedError(f"{name} cannot be read: {error}") from error


def _manifest_of(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = checks.plain(checks.object_of(value))
    checks.identity_of(found.get("identity", {}))
    return found


_CHECKS = {"manifest": _manifest_of, "codec": checks.codec_of, "lead-in": checks.lead_in_of}


def file_value(store: Store, entry: FileEntry) -> bytes:
    """A file's entry and its documents. Raises DamagedError where one of them is lost."""
    parts = [entry.to_bytes()]
    for source in entry.documents:
        document = store.document(source)
        if document is None:
            raise DamagedError(f"the document {source} is lost")
        parts.append(document.to_bytes())
    payload = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return seal(keys.name_key(entry.path), Kind.FILE, payload)


def open_file(key: bytes, value: bytes) -> tuple[FileEntry, list[DocumentEntry]]:
    """Inverse of :func:`file_value`; raises DamagedError."""
    payload, parts, at = unseal(key, Kind.FILE, value), [], 0
    while at < len(payload):
        if len(payload) - at < _LENGTH.size:
            raise DamagedError("a file's value is cut off")
        (length,) = _LENGTH.unpack_from(payload, at)
        at += _LENGTH.size
        parts.append(payload[at : at + length])
        at += length
    if at != len(payload) or not parts:
        raise DamagedError("a file's value is cut off")
    return _checked_file(key, FileEntry.from_bytes(parts[0]), [DocumentEntry.from_bytes(part) for part in parts[1:]])


def _checked_file(
    key: bytes, entry: FileEntry, documents: list[DocumentEntry]
) -> tuple[FileEntry, list[DocumentEntry]]:
    """The same, if it is the file that was asked for, with its documents, each with chunks that lie within it."""
    sources = [document.source for document in documents]
    if keys.name_key(entry.path) != key or len(set(sources)) != len(sources) or set(sources) != set(entry.documents):
        raise DamagedError("another file, or other documents than it names, stand in its place")
    if not (0 <= entry.size <= checks.INT64 and abs(entry.mtime_ns) <= checks.INT64):
        raise DamagedError("a file's size or time is out of bounds")
    for document in documents:
        for ref in document.chunks:
            if len(ref.chunk_id) != ID_BYTES or not 0 <= ref.start <= ref.end <= len(document.text):
                raise DamagedError(f"a chunk lies outside of the document {document.source}")
            if not 0 <= ref.tokens <= MOST_TOKENS:
                raise DamagedError(f"a chunk of {document.source} has a number of tokens that none can have")
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
    own = chunk_id_of(
        namespace=identity.get("namespace", ""),
        model_fingerprint=identity.get("fingerprint", ""),
        lead_in=info.lead_in,
        token_ids=info.token_ids,
    )
    if own != chunk_id or info.layers != layers:
        raise DamagedError("it describes another chunk")
    return info


def records_of(store: Store, chunk_id: bytes, level: str, layers: int) -> list[bytes]:
    """All records of a chunk at a level as they are stored; raises DamagedError."""
    found = []
    for layer in range(layers):
        record = store.read_kv(chunk_id, level, layer)
        if record is None:
            raise DamagedError(f"layer {layer} is not stored")
        found.append(encode_record(chunk_id, record[0], [record[1]]))
    return found


def mark_of_records(records: Sequence[bytes]) -> str:
    """Digest of all records of a level, from their own."""
    return digest_of(b"".join(record[-DIGEST_BYTES:] for record in records))


def base_of(chunk_id: bytes, level: str, record: bytes) -> str | None:
    """The coarser level that a record refines; raises DamagedError."""
    return base_level(level, decode_record(chunk_id, record)[1])


def stored_base(store: Store, chunk_id: bytes, level: str) -> str | None:
    """The coarser level that a stored one refines; None: none, or its record cannot be read."""
    try:
        record = store.read_kv(chunk_id, level, 0)
        return base_level(level, record[1]) if record is not None else None
    except DamagedError:
        return None


def check_level(chunk_id: bytes, chunk: Chunk, level: str, records: Sequence[bytes]) -> None:
    """Raises DamagedError where the records of a level are not those that a catalogue means."""
    meant = chunk.levels[level]
    if mark_of_records(records) != meant.mark or sum(map(len, records)) != meant.size:
        raise DamagedError("these are not the records that the catalogue names")
    if any(base_of(chunk_id, level, record) != meant.base for record in records):
        raise DamagedError("they refine another level than the catalogue says")


def holds_level(store: Store, chunk_id: bytes, chunk: Chunk, level: str) -> bool:
    """Whether a store's records of a level are those that a catalogue means, and sound."""
    try:
        return mark_of_records(records_of(store, chunk_id, level, chunk.layers)) == chunk.levels[level].mark
    except DamagedError:
        return False


# ---- the catalogue of a local store ----


def survey(store: Store, known: Catalogue | None, damaged: Damaged) -> Catalogue:
    """What a store holds. KV is read only where `known` does not tell its mark.

    Parameters
    ----------
    known : of the tier: a level of the same size is taken for the same there, unless another lossy one differs.
    damaged : told what cannot be sent.
    """
    files = {}
    for entry in store.files():
        try:
            mark = digest_of(file_value(store, entry))
            files[keys.name_key(entry.path).hex()] = File(mark, entry.mtime_ns)
        except DamagedError as error:
            damaged(entry.path, error.message)
    chunks = {}
    for chunk_id in store.chunk_ids():
        try:
            there = known.chunks.get(chunk_id.hex()) if known is not None else None
            found = survey_chunk(store, chunk_id, there, damaged)
        except DamagedError as error:
            damaged(f"chunk {chunk_id.hex()}", error.message)
        else:
            if found is not None:
                chunks[chunk_id.hex()] = found
    meta = {name: digest_of(meta_value(store, name)) for name in META}
    profiles = tuple(digest.hex() for digest in store.profile_digests())
    return Catalogue(store.manifest().get("identity", {}), meta, profiles, files, chunks)


def survey_chunk(store: Store, chunk_id: bytes, there: Chunk | None, damaged: Damaged) -> Chunk | None:
    """One chunk of it; None: it is described nowhere. `there` is what `known` says of it. Raises DamagedError."""
    info = store.chunk_info(chunk_id)
    if info is None:
        return None
    sizes = store.level_sizes(chunk_id)
    known = there.levels if there is not None else {}
    same = {level: known[level] for level, size in sizes.items() if level in known and known[level].size == size}
    if not same.keys() >= {*nested(sizes)}:  # a refinement belongs to just this base: none may be taken on trust
        same = {level: one for level, one in same.items() if not level_of(level).nested}
    levels = {}
    for level, size in sizes.items():
        try:
            one = same.get(level) or _survey_level(store, chunk_id, level, info.layers, size)
            levels[level] = replace(one, maker=store.made_with(chunk_id, level))
        except DamagedError as error:
            damaged(f"chunk {chunk_id.hex()} at level {level}", error.message)
    mark = digest_of(chunk_value(chunk_id, info))
    return Chunk(mark, info.layers, levels)


def _survey_level(store: Store, chunk_id: bytes, level: str, layers: int, size: int) -> Level:
    records = records_of(store, chunk_id, level, layers)
    base = base_of(chunk_id, level, records[0])
    if base is not None:
        for record, refined in zip(records, records_of(store, chunk_id, base, layers), strict=True):
            check, other = (decode_record(chunk_id, one)[1] for one in (record, refined))
            if stated_check(check) not in (0, check_of([other])):
                raise DamagedError(f"it refines another record of level {base} than is stored")
    return Level(size, mark_of_records(records), base)


def is_complete(store: Store, mine: Catalogue) -> bool:
    """Whether the store's catalogue has all chunks that its documents consist of."""
    return all(ref.chunk_id.hex() in mine.chunks for document in store.documents() for ref in document.chunks)


def profile_value(store: Store, digest: str) -> bytes:
    """A codec profile or a learned lead-in; raises DamagedError."""
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
    """Whether a blob's value is one that its name can mean: every byte is covered by a digest."""
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
