"""Rows as a writer puts them, and the keys of rows that go."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.core.cache import keys, tables
from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry, dump_json
from kvtool.core.cache.identity import HERE, UNKNOWN, Origin, seal_origin, unseal_origin
from kvtool.core.cache.record import Kind, decode_record, seal, unseal
from kvtool.core.cache.snapshot import Snapshot
from kvtool.core.errors import DamagedError

Row = tuple[bytes, bytes, bytes]  # table, key, value
Doomed = tuple[bytes, bytes]  # table, key
BY_CHUNK = (tables.CHUNKS, tables.LEVELS, tables.RECORDS, tables.USED, tables.WARM, tables.ADDED, tables.ORIGINS)


def meta_row(key: bytes, value: Mapping[str, Any]) -> Row:
    """Return the row of a fact that the store keeps about itself."""
    return tables.META, key, seal(key, Kind.MANIFEST, dump_json(value))


def profile_row(digest: bytes, data: bytes) -> Row:
    """A codec profile."""
    return tables.PROFILES, digest, seal(digest, Kind.PROFILE, data)


def file_row(entry: FileEntry) -> Row:
    """A file."""
    key = keys.name_key(entry.path)
    return tables.FILES, key, seal(key, Kind.FILE, entry.to_bytes())


def document_row(document: DocumentEntry) -> Row:
    """A document."""
    key = keys.name_key(document.source)
    return tables.DOCUMENTS, key, seal(key, Kind.DOCUMENT, document.to_bytes())


def level_rows(
    snapshot: Snapshot,
    chunk_id: bytes,
    info: ChunkInfo,
    level: str,
    layers: Sequence[bytes],
    replace: bool,
    origin: Origin | None = None,
) -> list[Row]:
    """A chunk at a level, as far as it is not stored yet, or stored damaged: a sound row is written again only where it
    is to be replaced."""
    rows = info_rows(snapshot, chunk_id, info, origin)
    replace = replace or bool(superseded(snapshot, chunk_id, origin))
    for number, record in enumerate(layers):
        key = keys.record_key(chunk_id, level, number)
        if replace or not _is_sound_record(snapshot, chunk_id, key):
            rows.append((tables.RECORDS, key, record))
    key = keys.level_key(chunk_id, level)
    row = keys.LevelRow(len(layers), len(info.token_ids), sum(map(len, layers)))
    return [*rows, (tables.LEVELS, key, row.seal(key))]


def info_rows(snapshot: Snapshot, chunk_id: bytes, info: ChunkInfo, origin: Origin | None = None) -> list[Row]:
    """A chunk's description, when it came and where from, as far as they are not stored yet.

    Raises
    ------
    ValueError : another chunk is stored under this id.
    """
    stored = None
    data = snapshot.get(tables.CHUNKS, chunk_id)
    if data is not None and not superseded(snapshot, chunk_id, origin):
        with contextlib.suppress(DamagedError):
            stored = ChunkInfo.from_bytes(unseal(chunk_id, Kind.CHUNK, data))
    if stored is not None:
        if (stored.token_ids, stored.lead_in, stored.layers) != (info.token_ids, info.lead_in, info.layers):
            raise ValueError(f"chunk {chunk_id.hex()} is stored with other tokens, lead-in or layers")
        if info.arithmetic in (None, stored.arithmetic) and info.sensitivity in (b"", stored.sensitivity):
            return []
    row = (tables.CHUNKS, chunk_id, seal(chunk_id, Kind.CHUNK, info.to_bytes()))
    if stored is not None:
        return [row]
    rows = [row, (tables.ADDED, chunk_id, keys.seal_number(chunk_id, int(time.time())))]
    if origin is not None and origin != HERE:
        rows.append((tables.ORIGINS, chunk_id, seal_origin(chunk_id, origin)))
    return rows


def origin_in(snapshot: Snapshot, chunk_id: bytes) -> Origin:
    """Return where a chunk's records were made; a row that cannot be read counts as foreign."""
    try:
        data = snapshot.get(tables.ORIGINS, chunk_id)
        return HERE if data is None else unseal_origin(chunk_id, data)
    except DamagedError:
        return UNKNOWN


def superseded(snapshot: Snapshot, chunk_id: bytes, origin: Origin | None) -> list[Doomed]:
    """List the rows of a chunk that give way to what `origin` puts: all of a foreign chunk, where `origin` is not.

    The records of a chunk that own documents use then never have another source, whatever their level.
    """
    if origin is None or origin.is_foreign or not origin_in(snapshot, chunk_id).is_foreign:
        return []
    return chunk_keys(snapshot, chunk_id)


def _is_sound_record(snapshot: Snapshot, chunk_id: bytes, key: bytes) -> bool:
    try:
        data = snapshot.get(tables.RECORDS, key)
        if data is None:
            return False
        header, _ = decode_record(chunk_id, data)
    except DamagedError:
        return False
    return keys.record_key(chunk_id, header.level, header.layer) == key


def check_layers(chunk_id: bytes, info: ChunkInfo, level: str, layers: Sequence[bytes]) -> None:
    """Raises ValueError where these are not the records of this chunk at this level, one a layer."""
    keys.check_chunk_id(chunk_id)
    if len(layers) != info.layers or not layers:
        raise ValueError(f"{len(layers)} records for a chunk of {info.layers} layers")
    for number, record in enumerate(layers):
        try:
            header, _ = decode_record(chunk_id, record)
        except DamagedError as error:
            raise ValueError(f"layer {number} is no record of this chunk: {error.message}") from error
        if (header.level, header.layer, header.tokens) != (level, number, len(info.token_ids)):
            raise ValueError(f"layer {number} holds a record of another level, layer or length")


# ---- what goes ---------------------------------------------------------------------------------------------------


def level_keys(snapshot: Snapshot, chunk_id: bytes, level: str) -> list[Doomed]:
    """The rows of a chunk's records at one level."""
    prefix = keys.record_key(chunk_id, level, 0)[:-2]
    doomed = [(tables.RECORDS, key) for key in snapshot.keys(tables.RECORDS, prefix)]
    key = keys.level_key(chunk_id, level)
    return [*doomed, (tables.LEVELS, key)] if snapshot.has(tables.LEVELS, key) else doomed


def chunk_keys(snapshot: Snapshot, chunk_id: bytes) -> list[Doomed]:
    """All rows of a chunk."""
    return [(table, key) for table in BY_CHUNK for key in snapshot.keys(table, chunk_id)]
