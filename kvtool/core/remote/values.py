"""Sealed values of a local store, as they are sent and taken in again, and the catalogue that names them."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvtool.core.cache import tables
from kvtool.core.cache.chunks import read_record
from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry, dump_json, stated_size
from kvtool.core.cache.identity import HERE, ID_BYTES, ORIGIN
from kvtool.core.cache.identity import chunk_id as chunk_id_of
from kvtool.core.cache.record import DIGEST_BYTES, Kind, decode_record, seal, unseal
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import base_level, check_of, level_of, nested, stated_check
from kvtool.core.errors import DamagedError, KvtoolError
from kvtool.core.remote.catalogue import (
    INT64,
    MOST_TOKENS,
    Catalogue,
    Chunk,
    File,
    Level,
    codec_of,
    digest_of,
    manifest_of,
    strict_json,
)
from kvtool.core.remote.signing import seal_of

# What a store says of itself, by the name of its value.
META: Mapping[str, Callable[[Store], dict[str, Any]]] = {
    "manifest": lambda store: {key: value for key, value in store.manifest().items() if key != ORIGIN},
    "codec": Store.codec_state,
}
_CHECKS = {"manifest": manifest_of, "codec": codec_of}
_LENGTH = struct.Struct("<Q")
_SEPARATOR = re.compile(r"[/\\]")  # of whatever system the file was ingested on


def meta_value(store: Store, name: str) -> bytes:
    return sealed_meta(name, META[name](store))


def sealed_meta(name: str, value: Mapping[str, Any]) -> bytes:
    return seal(name.encode(), Kind.MANIFEST, dump_json(value))


def open_meta(name: str, value: bytes) -> dict[str, Any]:
    try:
        return _CHECKS[name](strict_json(unseal(name.encode(), Kind.MANIFEST, value)))
    except ValueError as error:
        raise DamagedError(f"{name} cannot be read: {error}") from error


def file_value(store: Store, entry: FileEntry) -> bytes:
    parts: list[bytes | memoryview] = [replace(entry, origin=HERE).to_bytes()]
    for source in entry.documents:
        document = store.document_bytes(source)
        if document is None:
            raise DamagedError(f"the document {source} is lost")
        parts.append(document)
    payload = b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))
    return seal(tables.name_key(entry.path), Kind.FILE, payload)


def value_of(store: Store, name: str) -> bytes | None:
    """Return a store's own value by its name, whatever mark the name has; None if the store has no such file, chunk or
    record. Raises DamagedError."""
    kind, _, rest = name.partition("/")
    if kind == "kv":
        chunk, level, layer = rest.split("/")
        with store.snapshot() as snapshot:
            place = tables.record_key(bytes.fromhex(chunk), level.rpartition("-")[0], int(layer))
            record = snapshot.get(tables.RECORDS, place)
            return None if record is None else bytes(record)
    if kind == "stretch":
        stretch, _, part = rest.partition("/")
        return store.sealed_value(bytes.fromhex(stretch), part)
    key = rest.rpartition("-")[0]
    if kind == "meta":
        return meta_value(store, key)
    if kind == "profile":
        data = store.profile(bytes.fromhex(rest))
        if data is None:
            raise DamagedError(f"the codec profile {rest} is lost")
        return seal(bytes.fromhex(rest), Kind.PROFILE, data)
    if kind == "file":
        entry = store.file_at(bytes.fromhex(key))
        return None if entry is None else file_value(store, entry)
    info = store.chunk_info(bytes.fromhex(key))
    return None if info is None else seal(bytes.fromhex(key), Kind.CHUNK, info.to_bytes())


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


def open_file(key: bytes, value: bytes) -> tuple[FileEntry, list[DocumentEntry]]:
    first, *others = _parts_of_file(key, value)
    entry, documents = FileEntry.from_bytes(first), [DocumentEntry.from_bytes(part) for part in others]
    sources = [document.source for document in documents]
    if tables.name_key(entry.path) != key or len(set(sources)) != len(sources) or set(sources) != set(entry.documents):
        raise DamagedError("it is another file, or has other documents than it names")
    if "\0" in entry.path or not {".", ".."}.isdisjoint(_SEPARATOR.split(entry.path)):
        raise DamagedError("its path is none that an ingest gives a file")
    if any(source != entry.path and not source.startswith(f"{entry.path}#") for source in sources):
        raise DamagedError("one of its documents is another file's")
    if not (0 <= entry.size <= INT64 and abs(entry.mtime_ns) <= INT64):
        raise DamagedError("a file's size or time is out of bounds")
    for document in documents:
        named = 0
        for ref in document.chunks:
            if len(ref.chunk_id) != ID_BYTES or not 0 <= ref.start <= ref.end <= len(document.text):
                raise DamagedError(f"a chunk is outside of the document {document.source}")
            named += ref.end - ref.start
            if not 0 <= ref.tokens <= MOST_TOKENS:
                raise DamagedError(f"a chunk of {document.source} has a number of tokens that none can have")
        if named > len(document.text):  # each would be copied and looked through: a few bytes would take gigabytes
            raise DamagedError(f"chunks of {document.source} overlap")
    return entry, documents


def open_chunk(chunk_id: bytes, value: bytes, identity: Mapping[str, Any], layers: int) -> ChunkInfo:
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


def open_profile(digest: str, value: bytes) -> bytes:
    key = bytes.fromhex(digest)
    data = bytes(unseal(key, Kind.PROFILE, value))
    if hashlib.blake2b(data, digest_size=len(key)).digest() != key:
        raise DamagedError("it is another profile")
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


# ---- records of a chunk at a level --------------------------------------------------------------------------------


def records_of(store: Store, chunk_id: bytes, level: str, layers: int) -> list[bytes]:
    records = []
    with store.snapshot() as snapshot:
        for layer in range(layers):
            data = snapshot.get(tables.RECORDS, tables.record_key(chunk_id, level, layer))
            if data is None:
                raise DamagedError(f"layer {layer} is not stored")
            checked = read_record(chunk_id, level, layer, data)
            if isinstance(checked, KvtoolError):
                raise checked
            records.append(bytes(data))
    return records


def mark_of_records(records: Sequence[bytes]) -> str:
    return digest_of(b"".join(record[-DIGEST_BYTES:] for record in records))


def base_of(chunk_id: bytes, level: str, record: bytes) -> str | None:
    return base_level(level, decode_record(chunk_id, record)[1])


def stored_base(store: Store, chunk_id: bytes, level: str) -> str | None:
    """Return the coarser level that a stored one refines; None: none, or its record cannot be read."""
    try:
        record = store.read_kv(chunk_id, level, 0)
        return base_level(level, record[1]) if record is not None else None
    except DamagedError:
        return None


def check_level(chunk_id: bytes, chunk: Chunk, level: str, records: Sequence[bytes], sealed: bool = False) -> None:
    """Raises DamagedError where the records of a level are not those that a catalogue means. `sealed`: the catalogue's
    signature has to cover them."""
    meant = chunk.levels[level]
    if sealed and meant.seal != seal_of(records):
        raise DamagedError("the signature does not cover these records")
    if mark_of_records(records) != meant.mark or sum(map(len, records)) != meant.size:
        raise DamagedError("these are not the records that the catalogue names")
    if any(base_of(chunk_id, level, record) != meant.base for record in records):
        raise DamagedError("they refine another level than the catalogue says")


def holds_level(store: Store, chunk_id: bytes, chunk: Chunk, level: str) -> bool:
    try:
        return mark_of_records(records_of(store, chunk_id, level, chunk.layers)) == chunk.levels[level].mark
    except DamagedError:
        return False


# ---- the catalogue of a local store --------------------------------------------------------------------------------

_Described = TypeVar("_Described", File, Chunk)
_T = TypeVar("_T")
_AT_ONCE = 256  # chunks or files


def chunks_of(store: Store, entries: Iterable[FileEntry]) -> Iterator[bytes]:
    """Yield the ids of the chunks of files, document by document, some more than once. Damaged documents have none."""
    for source in (source for entry in entries for source in entry.documents):
        with suppress(DamagedError):  # reported where it is read to be sent
            document = store.document(source)
            yield from (ref.chunk_id for ref in (document.chunks if document is not None else ()))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a store: these files and chunks, the KV at these levels with those that they refine (None: all); of the
    beginning of the prompt, the chunk `prefix`, at all levels."""

    files: Sequence[FileEntry]
    chunks: Sequence[bytes]
    prefix: bytes
    levels: Sequence[str] | None


@dataclass(frozen=True)
class Survey:
    """Survey of a store, or of a `part` of it. `damaged` is called with what cannot be sent, and why. `sealed`: for a
    signature."""

    store: Store
    damaged: Callable[[str, str], None]
    sealed: bool = False
    part: Part | None = None

    def catalogue(self, known: Catalogue | None = None) -> Catalogue:
        """Build the catalogue. A level of the same size as in `known`, the shared store's, is not read and counts as
        the same, unless another lossy one differs, or `known` has no seal of it for a signature."""
        store = self.store
        files = self._files(known.files if known is not None else {})
        chunks = self._chunks(known.chunks if known is not None else {})
        meta = {name: digest_of(meta_value(store, name)) for name in META}
        profiles = [digest.hex() for digest in store.profile_digests()]
        if self.part is not None:
            makers = {level.maker for chunk in chunks.values() for level in chunk.levels.values()}
            makers.add(str(store.codec_state().get("profile", "")))
            profiles = [digest for digest in profiles if digest in makers]
        sound = tuple(digest for digest in profiles if self._is_readable(digest))
        return Catalogue(store.manifest().get("identity", {}), meta, sound, files, chunks)

    def _is_readable(self, profile: str) -> bool:
        try:
            return value_of(self.store, f"profile/{profile}") is not None
        except DamagedError as error:
            self.damaged(f"profile {profile}", error.message)
            return False

    def _files(self, known: Mapping[str, File]) -> dict[str, File]:
        files = dict[str, File]()
        entries = self.store.files() if self.part is None else self.part.files
        named = sorted((tables.name_key(entry.path), entry) for entry in entries)  # as documents are in the store
        for name, entry in _in_views(self.store, named):
            try:
                mark = digest_of(file_value(self.store, entry))
                file = File(mark, entry.mtime_ns, foreign=entry.origin.is_foreign)
                files[name.hex()] = _as_known(file, known.get(name.hex()))
            except DamagedError as error:
                self.damaged(entry.path, error.message)
        return files

    def _chunks(self, known: Mapping[str, Chunk]) -> dict[str, Chunk]:
        chunks, foreign, part = dict[str, Chunk](), self.store.foreign_chunks(), self.part
        for chunk_id in _in_views(self.store, self.store.chunk_ids() if part is None else part.chunks):
            key = chunk_id.hex()
            try:
                chunk = self.chunk(chunk_id, known.get(key), chunk_id in foreign)
                if chunk is not None:
                    chunks[key] = chunk
                elif part is not None and chunk_id != part.prefix:  # an empty one has no record
                    raise DamagedError("its description is lost")
            except DamagedError as error:
                self.damaged(f"chunk {key}", error.message)
        return chunks

    def chunk(self, chunk_id: bytes, known: Chunk | None, foreign: bool) -> Chunk | None:
        """Describe one chunk, whose entry in the shared store's catalogue is `known`; None if the store does not
        describe it. Raises DamagedError."""
        with self.store.snapshot() as snapshot:
            data = snapshot.get(tables.CHUNKS, chunk_id)
        if data is None:
            return None
        if known is not None and known.foreign != foreign:
            if foreign:
                return known  # nothing of others is added to the pusher's own
            known = None  # records of the same size may differ: those are another user's
        mark, layers = digest_of(data), ChunkInfo.from_bytes(unseal(chunk_id, Kind.CHUNK, data)).layers
        sizes = self._sizes(chunk_id)
        same = self._same(sizes, known.levels if known is not None else {})
        levels, before = dict[str, Level](), list[bytes]()
        for level in reversed([*sizes]):  # the coarser of nested ones first
            try:
                stored = same.get(level)
                if stored is None:
                    records = records_of(self.store, chunk_id, level, layers)
                    base = _checked_base(chunk_id, level, records, levels, before)
                    seal = seal_of(records) if self.sealed else None
                    stored = Level(sizes[level], mark_of_records(records), base, seal=seal)
                    if level_of(level).nested:  # a newer kvtool's level may be between two of them
                        before = records
                maker = self.store.made_with(chunk_id, level)
                levels[level] = stored if stored.maker == maker else replace(stored, maker=maker)
            except DamagedError as error:
                self.damaged(f"chunk {chunk_id.hex()} at level {level}", error.message)
        return _as_known(Chunk(mark, layers, levels, foreign=foreign), known)

    def _sizes(self, chunk_id: bytes) -> dict[str, int]:
        sizes = self.store.level_sizes(chunk_id)
        if self.part is None or self.part.levels is None or chunk_id == self.part.prefix:
            return sizes
        levels = {*self.part.levels}
        for level in nested(sizes):  # the finer first
            if level in levels:
                levels.add(stored_base(self.store, chunk_id, level) or level)
        return {level: size for level, size in sizes.items() if level in levels}

    def _same(self, sizes: Mapping[str, int], known: Mapping[str, Level]) -> dict[str, Level]:
        same = {level: known[level] for level, size in sizes.items() if level in known and known[level].size == size}
        if self.sealed:
            same = {level: stored for level, stored in same.items() if stored.seal is not None}
        if not same.keys() >= {*nested(sizes)}:  # a refinement belongs to just this base: none may be taken on trust
            same = {level: stored for level, stored in same.items() if not level_of(level).nested}
        return same


def _in_views(store: Store, items: Sequence[_T]) -> Iterator[_T]:
    """Yield items, each within a view of the store that covers some of them. A view of all would keep all that a writer
    replaces meanwhile."""
    for at in range(0, len(items), _AT_ONCE):
        with store.view():
            yield from items[at : at + _AT_ONCE]


def _as_known(mine: _Described, known: _Described | None) -> _Described:
    """Return the shared store's very entry if it is the same, so that a million of them are in memory once; else `mine`
    with the place of the same description. An entry that was made here does not become foreign by a push."""
    if known is None or known.mark != mine.mark:
        return mine
    placed = replace(mine, place=known.place, foreign=mine.foreign and known.foreign)
    return known if placed == known else placed


def _checked_base(
    chunk_id: bytes, level: str, records: Sequence[bytes], levels: Mapping[str, Level], before: Sequence[bytes]
) -> str | None:
    """Return the coarser level that records refine, whose own records are `before`. Raises DamagedError if it is
    missing, or if they refine others."""
    base = base_of(chunk_id, level, records[0])
    if base is not None:
        if base not in levels:
            raise DamagedError(f"level {base}, which it refines, is damaged or lost")
        for record, refined in zip(records, before, strict=True):
            check, other = (decode_record(chunk_id, data)[1] for data in (record, refined))
            if stated_check(check) != check_of([other]):
                raise DamagedError(f"it refines another record of level {base} than is stored")
    return base


# ---- measurements of the codec levels ------------------------------------------------------------------------------

State = Mapping[str, Any]


def join_codec(mine: State, theirs: State) -> dict[str, Any]:
    """Join a store's own codec state with what another store has measured. New records go on being made with the
    store's own profile. Losses are kept for each profile that records may name; of a level that both have measured with
    one profile its own counts."""
    if not mine or not theirs:
        return dict(mine or theirs)
    ours, other = (dict(state.get("losses") or {}) for state in (mine, theirs))
    rows = {maker: other.get(maker, {}) | ours.get(maker, {}) for maker in {**other, **ours}}
    profile = mine.get("profile") or theirs.get("profile") or ""
    return {**theirs, **mine, "profile": profile, "losses": rows}
