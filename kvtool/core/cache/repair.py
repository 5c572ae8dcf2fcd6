"""Dropping what is damaged, so that the next ingest or query makes it anew."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from kvtool.core.cache import keys, tables
from kvtool.core.cache.damage import BESIDE, CHUNK_TABLES, TIMES, Damage, sound_rows
from kvtool.core.cache.entries import FileEntry
from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.rows import Doomed, level_keys
from kvtool.core.cache.side import damaged_files
from kvtool.core.cache.side_log import mend_journals
from kvtool.core.cache.snapshot import Snapshot
from kvtool.core.cache.stretches import stretch_keys


def drop_files(root: Path, damages: list[Damage]) -> int:
    """Remove damaged files beside the records, which are made anew when they are needed, and damaged lines of journals.
    Returns how many files that were."""
    wrong = {os.fsdecode(bytes.fromhex(damage.key)) for damage in damages if damage.table == BESIDE}
    for place, _ in damaged_files(root):
        if place in wrong:
            (root / place).unlink(missing_ok=True)
    if wrong:
        mend_journals(root)
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
        if table == tables.STRETCHES:  # what is left of it is of no use
            doomed |= {*stretch_keys(snapshot, key[:ID_BYTES])}
        if damage.level:
            with contextlib.suppress(ValueError):  # a damaged level name: the row itself is doomed already
                doomed |= {*level_keys(snapshot, bytes.fromhex(damage.chunk), damage.level)}
        elif damage.chunk and table not in TIMES:  # of these only the order of eviction hangs on
            doomed |= {(t, k) for t in CHUNK_TABLES for k in snapshot.keys(t, bytes.fromhex(damage.chunk))}
    return _widen(snapshot, doomed) if doomed else (doomed, [])


def _widen(snapshot: Snapshot, doomed: set[Doomed]) -> tuple[set[Doomed], list[FileEntry]]:
    """Documents that lose a chunk's description go, and so do those of no file; files of anything lost are marked."""
    gone = {key for table, key in doomed if table == tables.CHUNKS}
    touched = {key[:ID_BYTES] for table, key in doomed if table in CHUNK_TABLES}
    stale = {key for table, key in doomed if table == tables.DOCUMENTS}
    for key, document in sound_rows(snapshot, tables.DOCUMENTS):
        chunks = {ref.chunk_id for ref in document.chunks}
        if chunks & gone:
            doomed.add((tables.DOCUMENTS, key))
        if chunks & touched:
            stale.add(key)
    marked, owned = [], set()
    for key, entry in sound_rows(snapshot, tables.FILES):
        kept = tuple(s for s in entry.documents if snapshot.has(tables.DOCUMENTS, keys.name_key(s)))
        kept = tuple(s for s in kept if (tables.DOCUMENTS, keys.name_key(s)) not in doomed)
        owned |= {keys.name_key(s) for s in kept}
        if kept != entry.documents or any(keys.name_key(s) in stale for s in kept):
            doomed.discard((tables.FILES, key))
            marked.append(replace(entry, documents=kept, settings="", digest=""))
    orphans = {key for key in snapshot.keys(tables.DOCUMENTS) if key not in owned}
    return doomed | {(tables.DOCUMENTS, key) for key in orphans}, marked
