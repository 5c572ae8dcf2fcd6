"""The writing side of a store: rows that wait to be committed, and the commit, weighed against the disk and the size
budget. Only :meth:`Store.writer` makes a writer, inside the writer lock. Nothing is computed inside a write
transaction: rows come encoded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain, islice
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvtool.core.cache import layout, tables
from kvtool.core.cache.collect import Documents, compact
from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry
from kvtool.core.cache.environment import PAGE_BYTES
from kvtool.core.cache.identity import HERE, ID_BYTES, Origin
from kvtool.core.cache.record import Bytes, Kind, seal
from kvtool.core.cache.side_files import combine_scores, fold_uses, take_log
from kvtool.core.cache.tables import Place, Row, RowKey, StretchInfo, chunk_keys, meta_row
from kvtool.core.cache.tree import Snapshot, Transaction
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
_UNSEEN_KEYS = (tables.BUDGET_KEY, tables.PINS_KEY, tables.COLLECTED_KEY)


class Writer:
    """Puts chunks and documents into a store, in batches. Belongs to one thread.

    A chunk is described before the document that needs it, so a document that is there never lacks the text of one; its
    KV may come later.

    `max_size`: the budget of this command; None: the store's own, read when it is first needed, since repair must work
    without it. So many `batch_bytes` of records wait to be written in one transaction, which holds its pages in memory.
    `fresh`: chunks put since the last file was committed: no document refers to them yet.
    """

    def __init__(self, store: StoreReader, max_size: int | None = None) -> None:
        self.store = store
        self.documents = Documents(store)
        self.batch_bytes = BATCH_BYTES
        self.fresh: set[bytes] = set()
        self._max_size = max_size
        self._keeps_reserve = True
        self._pending: dict[tuple[bytes, str], tuple[ChunkInfo, Sequence[Bytes], bool, Origin | None]] = {}
        self._pending_bytes = 0
        self._flushed_at = time.monotonic()
        self._unindexed = 0  # bytes that the retrieval index will take for what was committed
        self._tidied = False  # whether what killed writers left of stretches is dropped
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

    def drop_stretches(self, stretch_ids: Iterable[bytes], left: bool = True) -> int:
        """Drop these stretches, and what is `left` of others, which takes reading all names. Returns how many rows."""
        with self.store.environment.read() as snapshot:
            deletions = {row for stretch in stretch_ids for row in tables.stretch_keys(snapshot, stretch)}
            deletions |= {*tables.left_over(snapshot)} if left else set()
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

    # ---- settings and stretches ----------------------------------------------------------------------------------

    def put_stretch(self, stretch: bytes, info: StretchInfo, parts: Iterable[tuple[Place, bytes]]) -> None:
        """Replace a stretch; durable on return. Parts are taken one after another, a batch a transaction: a writer that
        is killed among them leaves parts that no read finds and `collect` drops. Raises NoSpaceError."""
        self.drop_stretches([stretch], left=not self._tidied)
        self._tidied = True
        rows: list[Row] = []
        for key, payload in parts:
            rows.append(tables.part_row(stretch, key, payload))
            if sum(len(value) for *_, value in rows) >= BATCH_BYTES:
                self.commit(rows)
                rows = []
        self.commit([*rows, tables.info_row(stretch, info)])

    def set_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest. The prompt's former beginning, which no document refers to, is then unreferenced."""
        self.commit([meta_row(tables.MANIFEST_KEY, manifest), meta_row(tables.COLLECTED_KEY, {})])
        self.documents.loose = None

    def put_profile(self, digest: bytes, data: bytes, state: dict[str, Any] | None = None) -> None:
        row = (tables.PROFILES, digest, seal(digest, Kind.PROFILE, data))
        self.commit([row, *([] if state is None else [meta_row(tables.CODEC_KEY, state)])])

    def set_budget(self, size: int | None) -> None:
        self.commit([meta_row(tables.BUDGET_KEY, {"bytes": size})])

    def set_pins(self, sources: Iterable[str]) -> None:
        self.commit([meta_row(tables.PINS_KEY, {"sources": sorted(set(sources))})])

    def set_codec_state(self, state: dict[str, Any]) -> None:
        self.commit([meta_row(tables.CODEC_KEY, state)])

    # ---- documents -----------------------------------------------------------------------------------------------

    def describe(self, infos: Mapping[bytes, ChunkInfo], origin: Origin | None = None) -> None:
        """Store descriptions of chunks whose KV is elsewhere; durable on return. `origin`: see :meth:`put_chunk`."""
        rows, deletions = self._described(infos, origin)
        if rows:
            self.commit(rows, sorted(deletions))
            self.fresh.update(infos)

    def _described(self, infos: Mapping[bytes, ChunkInfo], origin: Origin | None) -> tuple[list[Row], set[RowKey]]:
        rows: list[Row] = []
        deletions: set[RowKey] = set()
        with self.store.environment.read() as snapshot:
            for chunk_id, info in sorted(infos.items()):
                rows += tables.info_rows(snapshot, chunk_id, info, origin)
                deletions.update(tables.superseded(snapshot, chunk_id, origin))
        return rows, deletions

    def commit_file(self, entry: FileEntry, documents: Sequence[DocumentEntry]) -> None:
        """Store a file with its documents and what is left of their chunks in one transaction; durable on return.

        Chunks that wait for other files go on waiting. Removed documents' chunks stay until :meth:`collect`.
        Raises ValueError: a document names a chunk that was never put, or that was made elsewhere although the file was
        not; the entry names other documents; or one of them is another file's. Raises NoSpaceError: all buffered chunks
        are dropped.
        """
        self.commit_files([(entry, documents)])

    def commit_files(
        self,
        files: Sequence[tuple[FileEntry, Sequence[DocumentEntry]]],
        infos: Mapping[bytes, ChunkInfo] = MappingProxyType({}),
    ) -> None:
        """As :meth:`commit_file`, of several files: all of them, or none. `infos`: descriptions of chunks, made here,
        whose KV is put later."""
        documents = [document for _, of_file in files for document in of_file]
        self.documents.check(files, self.waiting | infos.keys())
        deletions: list[RowKey] = []
        for entry, _ in files:
            self.documents.loosen(entry.path)
            deletions += self.documents.stale_rows(entry.path, entry.documents)
        try:
            rows, replaced = self.take({ref.chunk_id for document in documents for ref in document.chunks})
            described, superseded = self._described(infos, HERE)
            rows += [*described, *map(tables.document_row, documents), *(tables.file_row(entry) for entry, _ in files)]
            self.commit(rows, [*deletions, *replaced, *superseded])
        except BaseException:
            self.forget()
            raise
        self.fresh = self.waiting

    def remove_file(self, path: str) -> bool:
        """Remove a file and its documents; their chunks stay until :meth:`collect`. False: it was not there."""
        key = tables.name_key(path)
        with self.store.environment.read() as snapshot:
            if not snapshot.has(tables.FILES, key):
                return False
        self.documents.loosen(path)
        self.commit([], [(tables.FILES, key), *self.documents.stale_rows(path, ())])
        return True

    def remove_documents(self, sources: Iterable[str]) -> int:
        """Remove documents, and files that have none left; their chunks stay until :meth:`collect`. A file that never
        had one is named by its path. Returns how many documents were there."""
        gone = set(sources)
        rows: list[Row] = []
        deletions: list[RowKey] = []
        for entry in self.store.files_with(gone):
            self.documents.loosen(entry.path)
            documents = tuple(source for source in entry.documents if source not in gone)
            if documents != entry.documents or (entry.path in gone and not entry.documents):
                deletions += [(tables.DOCUMENTS, tables.name_key(name)) for name in entry.documents if name in gone]
                if documents:
                    rows.append(tables.file_row(replace(entry, documents=documents)))
                else:
                    deletions.append((tables.FILES, tables.name_key(entry.path)))
        if deletions:
            self.commit(rows, deletions, weighed=False)
        return sum(table == tables.DOCUMENTS for table, _ in deletions)

    # ---- dropping ------------------------------------------------------------------------------------------------

    def drop_level(self, chunk_ids: Iterable[bytes], level: str) -> int:
        return self.drop(chunk_ids, lambda snapshot, chunk_id: tables.level_keys(snapshot, chunk_id, level))

    def drop_chunks(self, chunk_ids: Iterable[bytes]) -> int:
        return self.drop(chunk_ids, chunk_keys)

    def drop_profiles(self, digests: Iterable[bytes], state: dict[str, Any] | None = None) -> int:
        with self.store.environment.read() as snapshot:
            deletions = [(tables.PROFILES, digest) for digest in digests if snapshot.has(tables.PROFILES, digest)]
        if deletions:
            self.commit([] if state is None else [meta_row(tables.CODEC_KEY, state)], deletions)
        return len(deletions)

    def collect(
        self, keep: Iterable[bytes] = (), referred: Callable[[Set[bytes]], Iterable[bytes]] | None = None
    ) -> int:
        """Drop the chunks that no document refers to, except `keep`, and fold the access log; return how many.
        `referred` returns those of some chunks that documents refer to. If this writer knows to which
        chunks its documents no longer refer, only these are looked at; else all documents are read. Raises
        DamagedError, and drops nothing, if a document cannot be read."""
        self._check_open()
        self.flush()
        self.fold_access()
        live = {*keep} | self.fresh
        if referred is None or self.documents.loose is None:
            loose = self._unreferred(live)
        else:
            loose = self.documents.loose - live
            loose -= {*referred(loose)} if loose else set()
            loose |= self._drop_stale_stretches(lambda info: not loose.isdisjoint(info.chunks))
        dropped = self.drop(sorted(loose), chunk_keys, thins=False)  # no document has any of them
        if not self.store.is_collected():  # only now: after a kill the next writer does it
            self.commit([meta_row(tables.COLLECTED_KEY, {"documents": self.store.documents_revision()})])
        self.documents.loose = set()
        return dropped

    def _unreferred(self, live: set[bytes]) -> set[bytes]:
        """List the chunks that nothing refers to, but the `live` ones; drop the stretches made of any such chunk."""
        live = live | {ref.chunk_id for document in self.store.documents() for ref in document.chunks}
        self._drop_stale_stretches(lambda info: not live.issuperset(info.chunks))
        with self.store.environment.read() as snapshot:
            ids = {key[:ID_BYTES] for table in tables.BY_CHUNK for key in snapshot.keys(table)}
        return ids - live - {*self.store.stretches()}

    def _drop_stale_stretches(self, is_stale: Callable[[StretchInfo], bool]) -> set[bytes]:
        stale = {stretch for stretch, info in self.store.stretches().items() if is_stale(info)}
        self.drop_stretches(stale)
        return stale

    def fold_access(self) -> None:
        self.store.flush()
        uses, aside = take_log(self.store.path)
        before, scores = (self.store.times(table) for table in (tables.USED, tables.WARM))
        newer = {chunk: when for chunk, when in fold_uses(uses, max).items() if when > before.get(chunk, -1)}
        folded: dict[bytes, float] = fold_uses(uses, combine_scores)
        warmer = {chunk: round(combine_scores(scores.get(chunk, 0), score)) for chunk, score in folded.items()}
        times = {tables.USED: newer, tables.WARM: warmer}
        rows = [(table, key, tables.seal_number(key, when)) for table, of in times.items() for key, when in of.items()]
        if rows:
            self.commit(rows)
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)

    def mend(self, rows: Sequence[Row], deletions: Sequence[RowKey]) -> None:
        if rows or deletions:
            self.documents.loose = None
            self.commit(rows, deletions, weighed=False)

    def compact(self) -> int:
        self._check_open()
        self.flush()
        return compact(self.store)

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
            spare = layout.reserve() if self._keeps_reserve else 0
            layout.check_disk(environment.generation, need + _SLACK, environment.free_bytes(), spare)
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

    def require_room(self, need: int = 1) -> None:
        """Raise BudgetError if the budget has no room for so many bytes: before work whose result would not fit. Where
        there is a budget, each chunk is committed by itself from here on: the last that fits is stored."""
        budget = self._budget()
        if budget is None:
            return
        self.batch_bytes = 1
        used, free = layout.folder_bytes(self.store.path), self.store.environment.free_bytes()
        if used - free + need > budget.size:
            raise budget.refuse(used, need, free)

    def _budget(self) -> layout.Budget | None:
        if self._max_size is not None:
            return layout.Budget(self._max_size, given=True)
        size = self.store.budget()
        return None if size is None else layout.Budget(size)

    def _check_budget(self, need: int, texts: int) -> None:
        """Refuse what neither fits into free pages nor lets the file grow to the budget at most, less what the index of
        so many bytes of `texts` will take. How many of the free pages LMDB can use is known only afterwards: a batch
        may go over the budget by its size. Raises NoSpaceError."""
        budget, environment = self._budget(), self.store.environment
        if budget is None:
            return
        used, allocated = layout.folder_bytes(self.store.path), environment.allocated_bytes()
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
