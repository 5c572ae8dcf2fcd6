"""Checking, repairing and compacting a store."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.cache import environment as tables
from kvtool.core.cache import keys, layout, space
from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry, load_json
from kvtool.core.cache.environment import Snapshot
from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.pages import check_data_file
from kvtool.core.cache.record import Kind, decode_record, unseal
from kvtool.core.cache.side import damaged_files
from kvtool.core.common.children import python
from kvtool.core.errors import DamagedError, KvtoolError

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store

NO_LAYER = -1
_UNNAMED = re.compile(r"\.(tmp|.+)-\d+-[0-9a-f]{8}")  # see layout.atomic_write, retrieval/tables.py
_LEFT_SECONDS = 600.0  # a younger one may be another process's, about to be renamed
BESIDE = "beside"  # `table` of a damaged file beside the records: the retrieval index, vectors, what was measured
Doomed = tuple[bytes, bytes]  # table, key
_CHUNK_TABLES = (tables.CHUNKS, tables.LEVELS, tables.RECORDS)
_TIMES = (tables.USED, tables.ADDED)


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
        """Where it is, for people: a table's name, `beside` of a file beside the records, else `store`."""
        return self.table or "store"


# ---- verify ------------------------------------------------------------------------------------------------------


def verify(store: Store, sample: Fraction | None) -> list[Damage]:
    """Check a store in a child process: a damaged index can kill whoever walks it (STORE.md, fact 3)."""
    part = sample if sample is not None else Fraction(1)
    if not 0 < part <= 1:
        raise ValueError("a sample is a part of the whole, such as 1/7")
    command = python(_CHILD, os.fspath(store.path), str(part))
    ended = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    found = [Damage(**json.loads(line)) for line in ended.stdout.decode().splitlines() if line.startswith("{")]
    if ended.returncode == 0:
        return found
    if ended.returncode < 0:
        how = signal.Signals(-ended.returncode).name
        return [*found, Damage("", "", NO_LAYER, f"the index is damaged: walking it ended in {how}")]
    raise KvtoolError(f"verify failed: {ended.stderr.decode(errors='replace').strip()[-500:]}")


_CHILD = """
from kvtool.core.cache.upkeep import verify_here
verify_here(sys.argv[1], sys.argv[2])
"""


def verify_here(path: str, sample: str) -> None:
    """Body of the child: one JSON line on stdout for each damage. Nothing is printed by anybody else."""
    from kvtool.core.cache.store import Store

    try:
        with Store.open(Path(path)) as store:
            for damage in find_damage(store, Fraction(sample)):
                sys.stdout.write(json.dumps(asdict(damage)) + "\n")
                sys.stdout.flush()
    except DamagedError as error:
        sys.stdout.write(json.dumps(asdict(Damage("", "", NO_LAYER, error.message))) + "\n")


def find_damage(store: Store, sample: Fraction) -> Iterator[Damage]:
    """Walk every table in this process; table by table, each row in a short transaction."""
    with store._read() as snapshot:
        pages = [Damage("", "", NO_LAYER, reason) for reason in snapshot.damaged_pages()]
    yield from pages
    for table, check in _CHECKS.items():
        for key in _keys_of(store, table):
            if table is not tables.RECORDS or _in_sample(key, sample):
                yield from _check_row(store, table, key, check)
    yield from _missing_records(store)
    yield from _missing_chunks(store)
    for place, reason in damaged_files(store.path):
        yield Damage("", "", NO_LAYER, f"{place} {reason}", BESIDE, os.fsencode(place).hex())


def _keys_of(store: Store, table: bytes) -> list[bytes]:
    with store._read() as snapshot:
        return list(snapshot.keys(table))


def _in_sample(key: bytes, sample: Fraction) -> bool:
    return int.from_bytes(key[:8], "big") % sample.denominator < sample.numerator


def _check_row(
    store: Store, table: bytes, key: bytes, check: Callable[[bytes, memoryview], object]
) -> Iterator[Damage]:
    try:
        with store._read() as snapshot:
            data = snapshot.get(table, key)
        if data is not None:  # else a writer removed it meanwhile
            check(key, data)
    except (DamagedError, ValueError) as error:
        reason = error.message if isinstance(error, DamagedError) else str(error)
        yield _damage_at(table, key, reason)


def _damage_at(table: bytes, key: bytes, reason: str) -> Damage:
    chunk, level, layer = "", "", NO_LAYER
    name = tables.TABLE_NAMES[table]
    if table in (*_CHUNK_TABLES, *_TIMES):
        chunk = key[:ID_BYTES].hex()
    if table == tables.LEVELS:
        level = key[ID_BYTES:].decode("ascii", "replace")
    if table == tables.RECORDS:
        with contextlib.suppress(DamagedError):
            _, level, layer = keys.split_record_key(key)
    return Damage(chunk, level, layer, f"{reason} (in {name})", name, key.hex())


def _check_record(key: bytes, data: memoryview) -> None:
    chunk_id, level, layer = keys.split_record_key(key)
    header, _ = decode_record(chunk_id, data)
    if (header.level, header.layer) != (level, layer):
        raise DamagedError("the record of another level or layer stands here")


def _check_meta(key: bytes, data: memoryview) -> None:
    if key == keys.REVISION_KEY:
        keys.unseal_number(key, data)
    else:
        load_json(unseal(key, Kind.STORE if key == keys.STORE_KEY else Kind.MANIFEST, data))


_CHECKS: dict[bytes, Callable[[bytes, memoryview], Any]] = {
    tables.META: _check_meta,
    tables.FILES: lambda key, data: FileEntry.from_bytes(unseal(key, Kind.FILE, data)),
    tables.DOCUMENTS: lambda key, data: DocumentEntry.from_bytes(unseal(key, Kind.DOCUMENT, data)),
    tables.CHUNKS: lambda key, data: ChunkInfo.from_bytes(unseal(key, Kind.CHUNK, data)),
    tables.LEVELS: keys.LevelRow.unseal,
    tables.USED: keys.unseal_number,
    tables.ADDED: keys.unseal_number,
    tables.RECORDS: _check_record,
    tables.PROFILES: lambda key, data: unseal(key, Kind.PROFILE, data),
}


def _missing_records(store: Store) -> Iterator[Damage]:
    with store._read() as snapshot:
        missing = [damage for key, data in snapshot.items(tables.LEVELS) for damage in _absent(snapshot, key, data)]
    yield from missing


def _absent(snapshot: Snapshot, key: bytes, data: memoryview) -> Iterator[Damage]:
    try:
        row = keys.LevelRow.unseal(key, data)
    except DamagedError:  # reported as such
        return
    chunk_id, level = key[:ID_BYTES], key[ID_BYTES:].decode("ascii")
    for layer in range(row.layers):
        if not snapshot.has(tables.RECORDS, keys.record_key(chunk_id, level, layer)):
            yield Damage(chunk_id.hex(), level, layer, "the record is missing", "levels", key.hex())


def _missing_chunks(store: Store) -> Iterator[Damage]:
    """Documents that refer to chunks that are not there, files to documents that are not there."""
    for entry in _sound(store, tables.FILES, Kind.FILE, FileEntry.from_bytes):
        key = keys.name_key(entry.path).hex()
        for source in entry.documents:
            with store._read() as snapshot:
                if not snapshot.has(tables.DOCUMENTS, keys.name_key(source)):
                    yield Damage("", "", NO_LAYER, "a document of a file is missing", "files", key)
    for document in _sound(store, tables.DOCUMENTS, Kind.DOCUMENT, DocumentEntry.from_bytes):
        key = keys.name_key(document.source).hex()
        with store._read() as snapshot:
            lost = [ref for ref in document.chunks if not snapshot.has(tables.CHUNKS, ref.chunk_id)]
        for ref in lost:
            yield Damage(ref.chunk_id.hex(), "", NO_LAYER, "a chunk of a document is missing", "documents", key)


def _sound(store: Store, table: bytes, kind: Kind, parse: Callable[[memoryview], Any]) -> Iterator[Any]:
    for key in _keys_of(store, table):
        with contextlib.suppress(DamagedError), store._read() as snapshot:
            data = snapshot.get(table, key)
            if data is not None:
                yield parse(unseal(key, kind, data))


# ---- repair ------------------------------------------------------------------------------------------------------


def drop_files(root: Path, damages: list[Damage]) -> int:
    """Remove damaged files beside the records: they are made anew when they are needed. Returns how many."""
    wrong = {os.fsdecode(bytes.fromhex(damage.key)) for damage in damages if damage.table == BESIDE}
    for place, _ in damaged_files(root):
        if place in wrong:
            (root / place).unlink(missing_ok=True)
    return len(wrong)


def plan_repair(snapshot: Snapshot, damages: list[Damage]) -> tuple[set[Doomed], list[FileEntry]]:
    """Rows to drop so that no damage is left, and files to mark so that the next ingest reads them again.

    Documents that only lost KV stay: a query computes the hole, an ingest fills it.
    """
    by_name = {name: table for table, name in tables.TABLE_NAMES.items()}
    doomed: set[Doomed] = set()
    for damage in damages:
        table, key = by_name.get(damage.table), bytes.fromhex(damage.key)
        if table is None or (table == tables.META and key == keys.STORE_KEY):
            continue
        doomed.add((table, key))
        if damage.level:
            doomed |= _level_rows(snapshot, bytes.fromhex(damage.chunk), damage.level)
        elif damage.chunk and table not in _TIMES:  # of these only the order of eviction hangs on
            doomed |= {(t, k) for t in _CHUNK_TABLES for k in snapshot.keys(t, bytes.fromhex(damage.chunk))}
    return _widen(snapshot, doomed) if doomed else (doomed, [])


def _level_rows(snapshot: Snapshot, chunk_id: bytes, level: str) -> set[Doomed]:
    with contextlib.suppress(ValueError):  # a damaged level name: the row itself is doomed already
        prefix = keys.record_key(chunk_id, level, 0)[:-2]
        rows = {(tables.RECORDS, key) for key in snapshot.keys(tables.RECORDS, prefix)}
        return rows | {(tables.LEVELS, keys.level_key(chunk_id, level))}
    return set()


def _widen(snapshot: Snapshot, doomed: set[Doomed]) -> tuple[set[Doomed], list[FileEntry]]:
    """Documents that lose a chunk's description go, and so do those of no file; files of anything lost are marked."""
    gone = {key for table, key in doomed if table == tables.CHUNKS}
    touched = {key[:ID_BYTES] for table, key in doomed if table in _CHUNK_TABLES}
    stale = {key for table, key in doomed if table == tables.DOCUMENTS}
    for key, document in _entries(snapshot, tables.DOCUMENTS, Kind.DOCUMENT, DocumentEntry.from_bytes):
        chunks = {ref.chunk_id for ref in document.chunks}
        if chunks & gone:
            doomed.add((tables.DOCUMENTS, key))
        if chunks & touched:
            stale.add(key)
    marked, owned = [], set()
    for key, entry in _entries(snapshot, tables.FILES, Kind.FILE, FileEntry.from_bytes):
        kept = tuple(s for s in entry.documents if snapshot.has(tables.DOCUMENTS, keys.name_key(s)))
        kept = tuple(s for s in kept if (tables.DOCUMENTS, keys.name_key(s)) not in doomed)
        owned |= {keys.name_key(s) for s in kept}
        if kept != entry.documents or any(keys.name_key(s) in stale for s in kept):
            doomed.discard((tables.FILES, key))
            marked.append(replace(entry, documents=kept, settings="", digest=""))
    orphans = {key for key in snapshot.keys(tables.DOCUMENTS) if key not in owned}
    return doomed | {(tables.DOCUMENTS, key) for key in orphans}, marked


def _entries(
    snapshot: Snapshot, table: bytes, kind: Kind, parse: Callable[[memoryview], Any]
) -> Iterator[tuple[bytes, Any]]:
    """The rows of a table that are sound."""
    for key, data in snapshot.items(table):
        with contextlib.suppress(DamagedError):
            yield key, parse(unseal(key, kind, data))


# ---- compact -----------------------------------------------------------------------------------------------------


def compact(store: Store) -> int:
    """Copy the live pages into the next generation, switch the pointer, remove the old one. Writer lock held.

    Processes that read the old generation keep it until they look at the pointer; LMDB files are never replaced.
    """
    old = store._current()
    before = old.file_bytes()
    with store._read() as snapshot:
        live = snapshot.live_bytes()
    space.check_disk(old.generation, live, 0)
    fresh = layout.next_generation(store.path)
    layout.make_folder(fresh)
    try:
        old.copy_to(fresh)
        (fresh / "data.mdb").chmod(0o600)
        _sync_file(fresh / "data.mdb")
        layout.sync_folder(fresh)
        check_data_file(fresh)
        layout.point_to(store.path, fresh)
    except BaseException:
        if layout.current_generation(store.path) != fresh:
            shutil.rmtree(fresh, ignore_errors=True)
        raise
    store._follow()
    remove_old_generations(store.path)
    return before - store._current().file_bytes()


def _sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(root: Path) -> None:
    """Remove what killed processes have left: half a compaction, files never renamed. Writer lock held."""
    remove_old_generations(root)
    for at, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(OSError):
                path = Path(at, name)
                if _UNNAMED.fullmatch(name) and time.time() - path.stat().st_mtime > _LEFT_SECONDS:
                    path.unlink()


def remove_old_generations(root: Path) -> None:
    """Remove what a compaction, or one that was killed, has left. Writer lock held."""
    current = layout.current_generation(root)
    if current is None or not current.exists():
        return
    for folder in current.parent.iterdir():
        if folder != current and folder.name.startswith("gen-"):
            shutil.rmtree(folder, ignore_errors=True)
