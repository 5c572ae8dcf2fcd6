"""Rows that wait to be committed, and the commit, weighed against the disk and the size budget. Nothing is computed
inside a write transaction: rows come encoded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING

from kvtool.core.cache import space, tables
from kvtool.core.cache.entries import ChunkInfo
from kvtool.core.cache.environment import PAGE_BYTES
from kvtool.core.cache.identity import Origin
from kvtool.core.cache.record import Bytes
from kvtool.core.cache.stretches import left_over, stretch_keys
from kvtool.core.cache.tables import Row, RowKey, meta_row
from kvtool.core.cache.transaction import Snapshot, Transaction
from kvtool.core.errors import DamagedError, KvtoolError

if TYPE_CHECKING:
    from kvtool.core.cache.reader import StoreReader

BATCH_BYTES = 48 * 2**20
BATCH_SECONDS = 5.0
_CHUNKS_AT_ONCE = 2000  # deleted in one transaction
_ROW_SLACK = 256  # key, node and its share of the tree
_SLACK = 256 * 1024  # tree pages that a transaction rewrites, at most
_TREE_BYTES = 16 * PAGE_BYTES  # those of a usual one, beyond what it frees
_INDEX_SHARE = 6  # bytes of the retrieval index for a byte of a document as it is stored, both copies of a merge
_LIGHT = (tables.META, tables.USED, tables.WARM, tables.ADDED, tables.ORIGINS)  # whose size does not matter
_UNSEEN_TABLES = (tables.USED, tables.WARM, tables.ADDED, tables.STRETCHES)  # which no answer depends on
_UNSEEN_KEYS = (tables.BUDGET_KEY, tables.PINS_KEY, tables.COLLECTED_KEY, tables.UNFINISHED_KEY)


class Batch:
    """The chunks that one writer has put and not committed, and its commits. Belongs to one thread.

    `max_size`: the budget of this command; None: the store's own, read when it is first needed, since repair must work
    without it. So many `batch_bytes` of records wait to be written in one transaction, which holds its pages in memory.
    `fresh`: chunks put since the last file was committed: no document refers to them yet.
    """

    def __init__(self, store: StoreReader, max_size: int | None = None) -> None:
        self.store = store
        self.batch_bytes = BATCH_BYTES
        self.fresh: set[bytes] = set()
        self._max_size = max_size
        self._keeps_reserve = True
        self._pending: dict[tuple[bytes, str], tuple[ChunkInfo, Sequence[Bytes], bool, Origin | None]] = {}
        self._pending_bytes = 0
        self._flushed_at = time.monotonic()
        self._unindexed = 0  # bytes that the retrieval index will take for what was committed
        self._ended = False

    # ---- putting -------------------------------------------------------------------------------------------------

    def put_chunk(
        self,
        chunk_id: bytes,
        info: ChunkInfo,
        level: str,
        layers: Sequence[Bytes],
        *,
        replace: bool = False,
        origin: Origin | None = None,
        made_here: bool = False,
    ) -> None:
        """Add a chunk at a level. Buffered; durable after the next flush or commit_file. Raises ValueError: the records
        are not those of this chunk, level and layer; NoSpaceError: a batch was full and could not be written.

        `layers`: one encoded record (:func:`encode_record` with the chunk id as key) for each layer, in order; their
        memory must not change before they are durable. `replace`: also records that are stored and sound. `origin`:
        where the records were made; HERE, or a trusted source, replaces all that a foreign one has put; None: the chunk
        keeps its origin, as when a level is made from another. `made_here`: this process has just computed the digests,
        which are not compared again.
        """
        self._check_open()
        tables.check_layers(chunk_id, info, level, layers, made_here)
        key = (bytes(chunk_id), level)
        if key not in self._pending:
            self._pending[key] = (info, tuple(layers), replace, origin)
            self._pending_bytes += sum(map(len, layers))
            self.fresh.add(key[0])
        if self._pending_bytes >= self.batch_bytes or time.monotonic() - self._flushed_at > BATCH_SECONDS:
            self.flush()

    @property
    def waiting(self) -> set[bytes]:
        return {chunk_id for chunk_id, _ in self._pending}

    def has_chunk(self, chunk_id: bytes) -> bool:
        return chunk_id in self.waiting or self.store.has_chunk(chunk_id)

    def has_level(self, chunk_id: bytes, level: str) -> bool:
        return (chunk_id, level) in self._pending or level in self.store.sizes_here(chunk_id)

    def flush(self) -> None:
        """Make all buffered chunks durable; if that fails they are forgotten, as if never put."""
        rows, deletions = self.take()
        if any(table == tables.ADDED for table, *_ in rows):  # a kill now leaves chunks that nothing refers to
            rows.append(meta_row(tables.COLLECTED_KEY, {}))
        if rows:
            self.commit(rows, deletions)

    def take(self, chunk_ids: Set[bytes] | None = None) -> tuple[list[Row], list[RowKey]]:
        """Take chunks, all or only these, out of the buffer: their rows, and the rows that these replace."""
        places = sorted(key for key in self._pending if chunk_ids is None or key[0] in chunk_ids)
        chunks = [(*key, *self._pending.pop(key)) for key in places]
        self._pending_bytes = sum(len(layer) for _, layers, *_ in self._pending.values() for layer in layers)
        self._flushed_at = time.monotonic()
        rows: list[Row] = []
        deletions: set[RowKey] = set()
        with self.store.environment.read() as snapshot:
            for chunk_id, level, info, layers, replace, origin in chunks:
                rows += tables.level_rows(snapshot, chunk_id, info, level, layers, replace, origin)
                deletions.update(tables.superseded(snapshot, chunk_id, origin))
        return rows, sorted(deletions)

    def drop_stretches(self, stretches: Iterable[bytes], left: bool = True) -> int:
        """Drop these stretches, and what is `left` of others, which takes reading all names. Returns how many rows."""
        with self.store.environment.read() as snapshot:
            deletions = {row for stretch in stretches for row in stretch_keys(snapshot, stretch)}
            deletions |= {*left_over(snapshot)} if left else set()
        if deletions:
            self.commit([], sorted(deletions), weighed=False)
        return len(deletions)

    def drop(
        self, chunk_ids: Iterable[bytes], keys_of: Callable[[Snapshot, bytes], list[RowKey]], thins: bool | None = None
    ) -> int:
        dropped, left = 0, iter(chunk_ids)
        while batch := list(islice(left, _CHUNKS_AT_ONCE)):
            with self.store.environment.read() as snapshot:
                deletions = [keys_of(snapshot, chunk_id) for chunk_id in batch]
            dropped += sum(map(bool, deletions))
            self.commit([], [*chain.from_iterable(deletions)], thins=thins)
        return dropped

    def forget(self) -> None:
        self._pending.clear()
        self._pending_bytes = 0

    def end(self) -> None:
        self.forget()
        self._ended = True

    def _check_open(self) -> None:
        if self._ended:
            raise KvtoolError("this writer has ended")

    # ---- committing ----------------------------------------------------------------------------------------------

    def spend_reserve(self) -> None:
        """Let what follows take of the disk's reserve: it is small, and more is dropped as soon as it is there."""
        self._keeps_reserve = False

    def commit(
        self, rows: Sequence[Row], deletions: Sequence[RowKey] = (), weighed: bool = True, thins: bool | None = None
    ) -> None:
        """Put and delete rows in one durable transaction. `weighed` is False if that frees space, which must work on a
        full disk and over the budget. `thins`: whether documents have less of their chunks than before; None: if a row
        of a chunk is deleted. Raises NoSpaceError: the store is unchanged."""
        self._check_open()
        heavy = [row for row in rows if weighed and row[0] not in _LIGHT]
        need = sum(_pages(len(value)) for _, _, value in heavy)
        texts = sum(len(value) for table, _, value in heavy if table == tables.DOCUMENTS)
        environment = self.store.environment
        thinned = any(table in tables.CHUNK_TABLES for table, _ in deletions) if thins is None else thins
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
            spare = space.reserve() if self._keeps_reserve else 0
            space.check_disk(environment.generation, need + _SLACK, environment.free_bytes(), spare)
            self._check_budget(need, texts)
        environment.write(apply, need + _SLACK)
        self._unindexed += _INDEX_SHARE * texts

    def _revision_rows(self, touched: set[RowKey], thinned: bool) -> list[Row]:
        if all(table in _UNSEEN_TABLES or key in _UNSEEN_KEYS for table, key in touched):
            return []
        store = self.store
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
        """Raise NoSpaceError if the store is at its budget already: before work whose result would not fit."""
        budget = self._budget()
        if budget is None:
            return
        used, free = space.folder_bytes(self.store.path), self.store.environment.free_bytes()
        if used - free >= budget.size:
            raise budget.refuse(used, 1, free)

    def _budget(self) -> space.Budget | None:
        if self._max_size is not None:
            return space.Budget(self._max_size, given=True)
        size = self.store.budget()
        return None if size is None else space.Budget(size)

    def _check_budget(self, need: int, texts: int) -> None:
        """Refuse what neither fits into free pages nor lets the file grow to the budget at most, less what the index of
        so many bytes of `texts` will take. How many of the free pages LMDB can use is known only afterwards: a batch
        may go over the budget by its size. Raises NoSpaceError."""
        budget, environment = self._budget(), self.store.environment
        if budget is None:
            return
        used, allocated = space.folder_bytes(self.store.path), environment.allocated_bytes()
        free, most = environment.free_bytes(), budget.size - (used - environment.file_bytes())
        growth = max(0, need + _TREE_BYTES - free)
        # Removing, too, rewrites tree pages: what has just met the budget may go on.
        if allocated > most + _SLACK or (growth and allocated + growth > most - self._unindexed - _INDEX_SHARE * texts):
            raise budget.refuse(used, need, free)
        if allocated + need + _SLACK > most:
            environment.write(_turn, _SLACK)  # pages that the last transaction freed are usable one later


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
