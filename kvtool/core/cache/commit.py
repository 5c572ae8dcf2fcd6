"""A writer's commits, weighed against the disk and the size budget; and compaction, which makes the next generation of
the data file. Nothing is computed inside a write transaction: rows come encoded."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.cache import layout, space, tables
from kvtool.core.cache.environment import PAGE_BYTES
from kvtool.core.cache.tables import Row, RowKey, meta_row
from kvtool.core.cache.transaction import Transaction
from kvtool.core.cache.tree import check_data_file
from kvtool.core.errors import DamagedError

if TYPE_CHECKING:
    from kvtool.core.cache.reader import StoreReader

_ROW_SLACK = 256  # key, node and its share of the tree
_SLACK = 256 * 1024  # tree pages that a transaction rewrites, at most
_TREE_BYTES = 16 * PAGE_BYTES  # those of a usual one, beyond what it frees
_INDEX_SHARE = 6  # bytes of the retrieval index for a byte of a document as it is stored, both copies of a merge
_OF_CHUNKS = (tables.CHUNKS, tables.LEVELS, tables.RECORDS)
_LIGHT = (tables.META, tables.USED, tables.WARM, tables.ADDED, tables.ORIGINS)  # whose size does not matter
_UNSEEN_TABLES = (tables.USED, tables.WARM, tables.ADDED, tables.STRETCHES)  # which no answer depends on
_UNSEEN_KEYS = (tables.BUDGET_KEY, tables.PINS_KEY, tables.COLLECTED_KEY, tables.UNFINISHED_KEY)
Apply = Callable[[Transaction], None]
_UNNAMED = re.compile(r"\.(tmp|.+)-\d+-[0-9a-f]{8}")  # see layout.atomic_write, retrieval/tables.py
_LEFT_SECONDS = 600.0  # a younger one may be another process's, about to be renamed


class Commits:
    """The commits of one writer. `max_size`: the budget of this command; None: the store's own, read when it is first
    needed, since repair must work without it. `keeps_reserve`: whether the disk's reserve has to stay free."""

    def __init__(self, store: StoreReader, max_size: int | None) -> None:
        self._store = store
        self._max_size = max_size
        self.keeps_reserve = True
        self._unindexed = 0  # bytes that the retrieval index will take for what was committed

    def commit(
        self, rows: Sequence[Row], deletions: Sequence[RowKey] = (), weighed: bool = True, thins: bool | None = None
    ) -> None:
        """Put and delete rows in one durable transaction. `weighed` is False if that frees space, which must work on a
        full disk and over the budget. `thins`: whether documents have less of their chunks than before; None: if a row
        of a chunk is deleted. Raises NoSpaceError: the store is unchanged."""
        heavy = [row for row in rows if weighed and row[0] not in _LIGHT]
        need = sum(_pages(len(value)) for _, _, value in heavy)
        texts = sum(len(value) for table, _, value in heavy if table == tables.DOCUMENTS)
        environment = self._store.environment
        thinned = any(table in _OF_CHUNKS for table, _ in deletions) if thins is None else thins
        rows = [*rows, *self._revision_rows({*deletions, *((table, key) for table, key, _ in rows)}, thinned)]
        deletions = sorted(deletions)  # in the order of pages: each is met once, not once a key
        rows = sorted(rows, key=itemgetter(0, 1))
        with environment.read() as snapshot:  # of a damaged page LMDB dies, or writes into pages that are in use
            snapshot.touch([*deletions, *((table, key) for table, key, _ in rows)])

        def apply(transaction: Transaction) -> None:
            for table, key in deletions:
                transaction.delete(table + key)
            for table, key, value in rows:
                transaction.put(table + key, value)

        if need:
            spare = space.reserve() if self.keeps_reserve else 0
            space.check_disk(environment.generation, need + _SLACK, environment.free_bytes(), spare)
        budget = self._budget() if need else None
        if budget is None:
            environment.write(apply, need + _SLACK)
        else:
            self._write_within(budget, apply, need, texts)
        self._unindexed += _INDEX_SHARE * texts

    def _revision_rows(self, touched: set[RowKey], thinned: bool) -> list[Row]:
        if all(table in _UNSEEN_TABLES or key in _UNSEEN_KEYS for table, key in touched):
            return []
        store = self._store
        try:
            new, documents, dropped = store.revision() + 1, store.documents_revision(), store.dropped_revision()
        except DamagedError:  # any number that no index has been keyed by
            new = documents = dropped = time.time_ns()
        if any(table in (tables.FILES, tables.DOCUMENTS) for table, _ in touched):
            documents = new
        if thinned:
            dropped = new
        revision = (tables.META, tables.REVISION_KEY, tables.seal_number(tables.REVISION_KEY, new))
        return [revision, meta_row(tables.DOCUMENTS_KEY, {"documents": documents, "dropped": dropped})]

    def require_room(self) -> None:
        budget = self._budget()
        if budget is None:
            return
        used, free = space.folder_bytes(self._store.path), self._store.environment.free_bytes()
        if used - free >= budget.size:
            raise budget.refuse(used, 1, free)

    def _budget(self) -> space.Budget | None:
        if self._max_size is not None:
            return space.Budget(self._max_size, given=True)
        size = self._store.budget()
        return None if size is None else space.Budget(size)

    def _write_within(self, budget: space.Budget, apply: Apply, need: int, texts: int) -> None:
        """Write what fits into free pages, or lets the file grow to the budget at most, less what the index will take.
        How many of the free pages LMDB can use is known only afterwards: a batch may go over the budget by its size."""
        environment = self._store.environment
        used, allocated, free = (
            space.folder_bytes(self._store.path),
            environment.allocated_bytes(),
            environment.free_bytes(),
        )
        most = budget.size - (used - environment.file_bytes())
        growth = max(0, need + _TREE_BYTES - free)
        # Removing, too, rewrites tree pages: what has just met the budget may go on.
        if allocated > most + _SLACK or (growth and allocated + growth > most - self._unindexed - _INDEX_SHARE * texts):
            raise budget.refuse(used, need, free)
        if allocated + need + _SLACK > most:
            environment.write(_turn, _SLACK)  # pages that the last transaction freed are usable one later
        environment.write(apply, need + _SLACK)


def _turn(transaction: Transaction) -> None:
    key = tables.META + tables.STORE_KEY
    value = transaction.get(key)
    if value is not None:
        transaction.put(key, bytes(value))


def _pages(size: int) -> int:
    """Estimate the bytes that a value takes: whole pages from a half page on, with a 16-byte page header."""
    if size < PAGE_BYTES // 2:
        return size + _ROW_SLACK
    return -(-(size + 16) // PAGE_BYTES) * PAGE_BYTES + _ROW_SLACK


def compact(store: StoreReader) -> int:
    """Copy the live pages into the next generation, switch the pointer, remove the old one; return the bytes given back
    to the disk. Writer lock held. Readers keep the old generation until they look at the pointer."""
    old = store.environment
    before = old.file_bytes()
    with store.snapshot() as snapshot:
        live = snapshot.live_bytes()
    space.check_copy(old.generation, live, before)
    fresh = layout.next_generation(store.path)
    layout.make_folder(fresh)
    try:
        old.copy_to(fresh)
        (fresh / "data.mdb").chmod(0o600)
        with (fresh / "data.mdb").open("rb") as file:
            os.fsync(file.fileno())
        layout.sync_folder(fresh)
        check_data_file(fresh)
        layout.point_to(store.path, fresh)
    except BaseException:
        if layout.current_generation(store.path) != fresh:
            shutil.rmtree(fresh, ignore_errors=True)
        raise
    store.follow()
    remove_old_generations(store.path)
    return before - store.environment.file_bytes()


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
    current = layout.current_generation(root)
    if current is None or not current.exists():
        return
    for folder in current.parent.iterdir():
        if folder != current and folder.name.startswith("gen-"):
            shutil.rmtree(folder, ignore_errors=True)
