"""Damage check of a store: every digest and every reference is verified."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvtool.core.cache import keys, tables
from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry, load_json
from kvtool.core.cache.identity import ID_BYTES, unseal_origin
from kvtool.core.cache.record import Kind, decode_record, unseal
from kvtool.core.cache.side import damaged_files
from kvtool.core.cache.side_log import damaged_journals
from kvtool.core.cache.snapshot import Snapshot
from kvtool.core.cache.stretches import missing_parts, named_part, read_row
from kvtool.core.errors import DamagedError

if TYPE_CHECKING:
    from kvtool.core.cache.reader import StoreReader

NO_LAYER = -1
BESIDE = "beside"  # `table` of a damaged file beside the records: index, vectors, journals, what was measured
CHUNK_TABLES = (tables.CHUNKS, tables.LEVELS, tables.RECORDS)
TIMES = (tables.USED, tables.WARM, tables.ADDED)


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that does not match its digest, or is missing.

    Parameters
    ----------
    chunk : the chunk's id in hex; empty where the damage is not in a chunk.
    level : codec level; empty where it is not in a KV record.
    layer : -1 where it is not in a KV record.
    reason : what is wrong.
    table, key : where, for :meth:`Writer.repair`; key in hex.
    """

    chunk: str
    level: str
    layer: int
    reason: str
    table: str = ""
    key: str = ""

    @property
    def kind(self) -> str:
        """Return the place for people: a table's name, `beside` for a file next to the records, else `store`."""
        return self.table or "store"


def of_store(reason: str) -> Damage:
    """Damage of the store as a whole."""
    return Damage("", "", NO_LAYER, reason)


def find_damage(store: StoreReader, sample: Fraction) -> Iterator[Damage]:
    """Walk every table in this process; table by table, each row in a short transaction."""
    with store.snapshot() as snapshot:
        pages = [of_store(reason) for reason in snapshot.damaged_pages()]
    yield from pages
    for table in _READS:
        for key in _keys_of(store, table):
            if table not in (tables.RECORDS, tables.STRETCHES) or in_sample(key, sample):
                yield from _check_row(store, table, key)
    yield from _missing_records(store)
    yield from _without_profile(store)
    yield from _missing_parts(store)
    yield from _missing_chunks(store)
    for place, reason in chain(damaged_files(store.path), damaged_journals(store.path)):
        yield Damage("", "", NO_LAYER, f"{place} {reason}", BESIDE, os.fsencode(place).hex())


def _keys_of(store: StoreReader, table: bytes) -> list[bytes]:
    with store.snapshot() as snapshot:
        return list(snapshot.keys(table))


def in_sample(key: bytes, sample: Fraction) -> bool:
    """Return True if a key, which is a digest, is in a share of all; always the same ones are."""
    return int.from_bytes(key[:8], "big") % sample.denominator < sample.numerator


def _check_row(store: StoreReader, table: bytes, key: bytes) -> Iterator[Damage]:
    try:
        with store.snapshot() as snapshot:
            data = snapshot.get(table, key)
        if data is not None:  # else a writer removed it meanwhile
            _READS[table](key, data)
    except (DamagedError, ValueError) as error:
        reason = error.message if isinstance(error, DamagedError) else str(error)
        yield _damage_at(table, key, reason)


def _damage_at(table: bytes, key: bytes, reason: str) -> Damage:
    chunk, level, layer = "", "", NO_LAYER
    name = tables.TABLE_NAMES[table]
    if table in (*CHUNK_TABLES, *TIMES, tables.ORIGINS):
        chunk = key[:ID_BYTES].hex()
    if table == tables.LEVELS:
        level = key[ID_BYTES:].decode("ascii", "replace")
    if table == tables.RECORDS:
        with contextlib.suppress(DamagedError):
            _, level, layer = keys.split_record_key(key)
    return Damage(chunk, level, layer, f"{reason} (in {name})", name, key.hex())


def _read_record(key: bytes, data: memoryview) -> None:
    chunk_id, level, layer = keys.split_record_key(key)
    header, _ = decode_record(chunk_id, data)
    if (header.level, header.layer) != (level, layer):
        raise DamagedError("the record of another level or layer stands here")


def _read_meta(key: bytes, data: memoryview) -> None:
    if key == keys.REVISION_KEY:
        keys.unseal_number(key, data)
    else:
        load_json(unseal(key, Kind.STORE if key == keys.STORE_KEY else Kind.MANIFEST, data))


_READS: dict[bytes, Callable[[bytes, memoryview], Any]] = {
    tables.META: _read_meta,
    tables.FILES: lambda key, data: FileEntry.from_bytes(unseal(key, Kind.FILE, data)),
    tables.DOCUMENTS: lambda key, data: DocumentEntry.from_bytes(unseal(key, Kind.DOCUMENT, data)),
    tables.CHUNKS: lambda key, data: ChunkInfo.from_bytes(unseal(key, Kind.CHUNK, data)),
    tables.LEVELS: keys.LevelRow.unseal,
    tables.USED: keys.unseal_number,
    tables.WARM: keys.unseal_number,
    tables.ADDED: keys.unseal_number,
    tables.RECORDS: _read_record,
    tables.PROFILES: lambda key, data: unseal(key, Kind.PROFILE, data),
    tables.STRETCHES: read_row,
    tables.ORIGINS: unseal_origin,
}


def sound_rows(snapshot: Snapshot, table: bytes) -> Iterator[tuple[bytes, Any]]:
    """The rows of a table that are not damaged: key and what is stored under it."""
    for key in snapshot.keys(table):
        yield from _sound_row(snapshot, table, key)


def _sound_row(snapshot: Snapshot, table: bytes, key: bytes) -> Iterator[tuple[bytes, Any]]:
    with contextlib.suppress(DamagedError):
        data = snapshot.get(table, key)
        if data is not None:
            yield key, _READS[table](key, data)


def _missing_records(store: StoreReader) -> Iterator[Damage]:
    with store.snapshot() as snapshot:
        rows = sound_rows(snapshot, tables.LEVELS)  # the others are reported as such
        missing = [damage for key, row in rows for damage in _absent(snapshot, key, row)]
    yield from missing


def _without_profile(store: StoreReader) -> Iterator[Damage]:
    """Levels whose records nobody can decode, since the codec profile that they name is damaged."""
    with store.snapshot() as snapshot:
        sound = {key for key, _ in sound_rows(snapshot, tables.PROFILES)}
        damaged = {key.hex() for key in snapshot.keys(tables.PROFILES)} - {key.hex() for key in sound}
        rows = [key for key, _ in sound_rows(snapshot, tables.LEVELS)] if damaged else []
    for key in rows:
        chunk_id, level = key[:ID_BYTES], key[ID_BYTES:].decode("ascii")
        if store.made_with(chunk_id, level) in damaged:
            reason = "the codec profile of its records is damaged"
            yield Damage(chunk_id.hex(), level, NO_LAYER, reason, "levels", key.hex())


def _missing_parts(store: StoreReader) -> Iterator[Damage]:
    with store.snapshot() as snapshot:
        missing = list(missing_parts(snapshot))
    for stretch, place in missing:
        name = tables.TABLE_NAMES[tables.STRETCHES]
        yield Damage("", "", NO_LAYER, f"the {named_part(place)} of a stretch are missing", name, stretch.hex())


def _absent(snapshot: Snapshot, key: bytes, row: keys.LevelRow) -> Iterator[Damage]:
    chunk_id, level = key[:ID_BYTES], key[ID_BYTES:].decode("ascii")
    for layer in range(row.layers):
        if not snapshot.has(tables.RECORDS, keys.record_key(chunk_id, level, layer)):
            yield Damage(chunk_id.hex(), level, layer, "the record is missing", "levels", key.hex())


def _missing_chunks(store: StoreReader) -> Iterator[Damage]:
    """Documents that refer to chunks that are not there, files to documents that are not there."""
    for key in _keys_of(store, tables.FILES):
        with store.snapshot() as snapshot:
            lost = [
                source
                for _, entry in _sound_row(snapshot, tables.FILES, key)
                for source in entry.documents
                if not snapshot.has(tables.DOCUMENTS, keys.name_key(source))
            ]
        for _ in lost:
            yield Damage("", "", NO_LAYER, "a document of a file is missing", "files", key.hex())
    for key in _keys_of(store, tables.DOCUMENTS):
        with store.snapshot() as snapshot:
            refs = [ref for _, entry in _sound_row(snapshot, tables.DOCUMENTS, key) for ref in entry.chunks]
            gone = [ref for ref in refs if not snapshot.has(tables.CHUNKS, ref.chunk_id)]
        for ref in gone:
            yield Damage(ref.chunk_id.hex(), "", NO_LAYER, "a chunk of a document is missing", "documents", key.hex())
