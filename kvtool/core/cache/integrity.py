"""Verification of every digest and every reference of a store, and repair. :func:`verify` runs in a child process: LMDB
itself can die of a damaged index. What :func:`repair` drops is computed again by the next ingest or query."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvtool.core.cache import tables
from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry, load_json
from kvtool.core.cache.identity import ID_BYTES, unseal_origin
from kvtool.core.cache.record import Kind, unseal
from kvtool.core.cache.side_files import damaged_files
from kvtool.core.cache.store import Store
from kvtool.core.cache.tables import RowKey, file_row, level_keys, missing_parts, named_part, read_row, stretch_keys
from kvtool.core.cache.tree import Snapshot, value_or_damage
from kvtool.core.cache.writer import Writer
from kvtool.core.common.children import python
from kvtool.core.errors import DamagedError, KvtoolError

BESIDE = "side file"  # `table` of a damaged side file: index, vectors, what was measured


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that does not match its digest, or is missing. `table` and `key` (in hex) say where, for
    :func:`repair`; empty: the store as a whole. `chunk` (in hex), `level` and `layer` are empty and -1 where the damage
    is not in one."""

    reason: str
    table: str = ""
    key: str = ""
    chunk: str = ""
    level: str = ""
    layer: int = -1

    @property
    def kind(self) -> str:
        return self.table or "store"


def find_damage(store: Store, sample: Fraction) -> Iterator[Damage]:
    with store.snapshot() as snapshot:
        pages = [*map(Damage, snapshot.damaged_pages())]
    yield from pages
    for table in _READS:
        for key in _keys_of(store, table):
            if table not in (tables.RECORDS, tables.STRETCHES) or in_sample(key, sample):
                yield from _check_row(store, table, key)
    yield from _missing_records(store)
    yield from _without_profile(store)
    with store.snapshot() as snapshot:
        parts = list(missing_parts(snapshot))
    for stretch, part in parts:
        yield Damage(f"the {named_part(part)} of a state checkpoint are missing", "checkpoints", stretch.hex())
    yield from _missing_chunks(store)
    for path, reason in damaged_files(store.path):
        yield Damage(f"{path} {reason}", BESIDE, os.fsencode(path).hex())


def _keys_of(store: Store, table: bytes) -> list[bytes]:
    with store.snapshot() as snapshot:
        return list(snapshot.keys(table))


def in_sample(key: bytes, sample: Fraction) -> bool:
    return int.from_bytes(key[:8], "big") % sample.denominator < sample.numerator


def _check_row(store: Store, table: bytes, key: bytes) -> Iterator[Damage]:
    try:
        with store.snapshot() as snapshot:
            data = snapshot.get(table, key)
        if data is not None:  # else a writer removed it meanwhile
            _READS[table](key, data)
    except (DamagedError, ValueError) as error:
        reason = error.message if isinstance(error, DamagedError) else str(error)
        yield _damage_at(table, key, reason)


def _damage_at(table: bytes, key: bytes, reason: str) -> Damage:
    chunk, level, layer = "", "", -1
    name = tables.TABLE_NAMES[table]
    if table in tables.BY_CHUNK:
        chunk = key[:ID_BYTES].hex()
    if table == tables.LEVELS:
        level = key[ID_BYTES:].decode("ascii", "replace")
    if table == tables.RECORDS:
        with contextlib.suppress(DamagedError):
            _, level, layer = tables.split_record_key(key)
    return Damage(f"{reason} (in {name})", name, key.hex(), chunk, level, layer)


def _read_meta(key: bytes, data: memoryview) -> None:
    if key == tables.REVISION_KEY:
        tables.unseal_number(key, data)
    else:
        load_json(unseal(key, Kind.STORE if key == tables.STORE_KEY else Kind.MANIFEST, data))


_READS: dict[bytes, Callable[[bytes, memoryview], Any]] = {
    tables.META: _read_meta,
    tables.FILES: lambda key, data: FileEntry.from_bytes(unseal(key, Kind.FILE, data)),
    tables.DOCUMENTS: lambda key, data: DocumentEntry.from_bytes(unseal(key, Kind.DOCUMENT, data)),
    tables.CHUNKS: lambda key, data: ChunkInfo.from_bytes(unseal(key, Kind.CHUNK, data)),
    tables.LEVELS: tables.LevelRow.unseal,
    tables.USED: tables.unseal_number,
    tables.WARM: tables.unseal_number,
    tables.ADDED: tables.unseal_number,
    tables.RECORDS: lambda key, data: tables.open_record(*tables.split_record_key(key), data),
    tables.PROFILES: lambda key, data: unseal(key, Kind.PROFILE, data),
    tables.STRETCHES: read_row,
    tables.ORIGINS: unseal_origin,
}


def sound_rows(snapshot: Snapshot, table: bytes) -> Iterator[tuple[bytes, Any]]:
    for key in snapshot.keys(table):
        yield from _sound_row(snapshot, table, key)


def _sound_row(snapshot: Snapshot, table: bytes, key: bytes) -> Iterator[tuple[bytes, Any]]:
    with contextlib.suppress(DamagedError):
        data = snapshot.get(table, key)
        if data is not None:
            yield key, _READS[table](key, data)


def _missing_records(store: Store) -> Iterator[Damage]:
    missing: list[Damage] = []
    with store.snapshot() as snapshot:
        for key, row in sound_rows(snapshot, tables.LEVELS):  # the others are reported as such
            chunk_id, level = key[:ID_BYTES], key[ID_BYTES:].decode("ascii")
            missing += (
                Damage("the record is missing", "levels", key.hex(), chunk_id.hex(), level, layer)
                for layer in range(row.layers)
                if not snapshot.has(tables.RECORDS, tables.record_key(chunk_id, level, layer))
            )
    yield from missing


def _without_profile(store: Store) -> Iterator[Damage]:
    """Yield levels whose records cannot be decoded, since the codec profile that they name is damaged. One that is
    missing may still come, with another pull."""
    with store.snapshot() as snapshot:
        sound = {key for key, _ in sound_rows(snapshot, tables.PROFILES)}
        damaged = {key.hex() for key in snapshot.keys(tables.PROFILES)} - {key.hex() for key in sound}
        rows = [key for key, _ in sound_rows(snapshot, tables.LEVELS)] if damaged else []
    for key in rows:
        chunk_id, level = key[:ID_BYTES], key[ID_BYTES:].decode("ascii")
        if store.made_with(chunk_id, level) in damaged:
            reason = "the codec profile of its records is damaged"
            yield Damage(reason, "levels", key.hex(), chunk_id.hex(), level)


def _missing_chunks(store: Store) -> Iterator[Damage]:
    for key in _keys_of(store, tables.FILES):
        with store.snapshot() as snapshot:
            lost = [
                source
                for _, entry in _sound_row(snapshot, tables.FILES, key)
                for source in entry.documents
                if not snapshot.has(tables.DOCUMENTS, tables.name_key(source))
            ]
        for _ in lost:
            yield Damage("a document of a file is missing", "files", key.hex())
    for key in _keys_of(store, tables.DOCUMENTS):
        with store.snapshot() as snapshot:
            refs = [ref for _, entry in _sound_row(snapshot, tables.DOCUMENTS, key) for ref in entry.chunks]
            gone = [ref for ref in refs if not snapshot.has(tables.CHUNKS, ref.chunk_id)]
        for ref in gone:
            yield Damage("a chunk of a document is missing", "documents", key.hex(), ref.chunk_id.hex())


def repair(store: Store, writer: Writer, damages: Iterable[Damage]) -> int:
    """Drop what is damaged; return how many rows and files were touched. Files of lost parts keep their entry, with an
    empty digest and settings: ingest sees them as changed."""
    damages = list(damages)
    with store.environment.read() as snapshot:
        deletions, marked = _plan_repair(snapshot, [damage for damage in damages if damage.table != BESIDE])
        deletions = _writable(snapshot, deletions)
    writer.mend([*map(file_row, marked)], sorted(deletions))
    return len(deletions) + len(marked) + _drop_files(store.path, damages)


def _writable(snapshot: Snapshot, rows: set[RowKey]) -> set[RowKey]:
    """Return the rows that LMDB can delete without meeting a damaged page."""
    if not isinstance(value_or_damage(snapshot.touch, list(rows)), DamagedError):
        return rows
    return {row for row in rows if not isinstance(value_or_damage(snapshot.touch, [row]), DamagedError)}


def _drop_files(root: Path, damages: list[Damage]) -> int:
    wrong = {os.fsdecode(bytes.fromhex(damage.key)) for damage in damages if damage.table == BESIDE}
    for path, _ in damaged_files(root):
        if path in wrong:
            (root / path).unlink(missing_ok=True)
    return len(wrong)


def _plan_repair(snapshot: Snapshot, damages: list[Damage]) -> tuple[set[RowKey], list[FileEntry]]:
    """Return the rows to drop so that no damage is left, and files to mark so that the next ingest reads them again.
    Documents that only lost KV stay: a query computes the hole, an ingest fills it."""
    by_name = {name: table for table, name in tables.TABLE_NAMES.items()}
    deletions: set[RowKey] = set()
    for damage in damages:
        table, key = by_name.get(damage.table), bytes.fromhex(damage.key)
        if table is None or (table == tables.META and key == tables.STORE_KEY):
            continue
        deletions.add((table, key))
        if table == tables.STRETCHES:  # what is left of it is of no use
            deletions |= {*stretch_keys(snapshot, key[:ID_BYTES])}
        if damage.level:
            with contextlib.suppress(ValueError):  # a damaged level name: the row itself is already in `deletions`
                deletions |= {*level_keys(snapshot, bytes.fromhex(damage.chunk), damage.level)}
        elif damage.chunk and table not in tables.TIMES:  # these only decide the order of eviction
            deletions |= {(t, k) for t in tables.CHUNK_TABLES for k in snapshot.keys(t, bytes.fromhex(damage.chunk))}
    return _widen(snapshot, deletions) if deletions else (deletions, [])


def _widen(snapshot: Snapshot, deletions: set[RowKey]) -> tuple[set[RowKey], list[FileEntry]]:
    gone = {key for table, key in deletions if table == tables.CHUNKS}
    touched = {key[:ID_BYTES] for table, key in deletions if table in tables.CHUNK_TABLES}
    stale = {key for table, key in deletions if table == tables.DOCUMENTS}
    for key, document in sound_rows(snapshot, tables.DOCUMENTS):
        chunks = {ref.chunk_id for ref in document.chunks}
        if chunks & gone:
            deletions.add((tables.DOCUMENTS, key))
        if chunks & touched:
            stale.add(key)
    marked, owned = [], set()
    for key, entry in sound_rows(snapshot, tables.FILES):
        documents = tuple(s for s in entry.documents if snapshot.has(tables.DOCUMENTS, tables.name_key(s)))
        documents = tuple(s for s in documents if (tables.DOCUMENTS, tables.name_key(s)) not in deletions)
        owned |= {tables.name_key(s) for s in documents}
        if documents != entry.documents or any(tables.name_key(s) in stale for s in documents):
            deletions.discard((tables.FILES, key))
            marked.append(replace(entry, documents=documents, settings="", digest=""))
    orphans = {key for key in snapshot.keys(tables.DOCUMENTS) if key not in owned}
    return deletions | {(tables.DOCUMENTS, key) for key in orphans}, marked


def verify(store: Store, sample: Fraction | None = None) -> list[Damage]:
    """Check every digest and every reference of a store; `sample`: the KV of only this share of the chunks."""
    part = sample if sample is not None else Fraction(1)
    if not 0 < part <= 1:
        raise ValueError("a sample is a part of the whole, such as 1/7")
    command = python(_CHILD, os.fspath(store.path), str(part))
    ended = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    damages = [Damage(**json.loads(line)) for line in ended.stdout.decode().splitlines() if line.startswith("{")]
    if ended.returncode == 0:
        return damages
    if ended.returncode < 0:
        how = signal.Signals(-ended.returncode).name
        return [*damages, Damage(f"the index is damaged: walking it ended in {how}")]
    raise KvtoolError(f"verify failed: {ended.stderr.decode(errors='replace').strip()[-500:]}")


_CHILD = """
from kvtool.core.cache.integrity import verify_here
verify_here(sys.argv[1], sys.argv[2])
"""


def verify_here(path: str, sample: str) -> None:
    """Run in the child process: print one JSON line on stdout for each damage, and nothing else."""
    try:
        with Store.open(Path(path)) as store:
            for damage in find_damage(store, Fraction(sample)):
                sys.stdout.write(json.dumps(asdict(damage)) + "\n")
                sys.stdout.flush()
    except DamagedError as error:
        sys.stdout.write(json.dumps(asdict(Damage(error.message))) + "\n")
