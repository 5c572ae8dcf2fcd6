"""The writing side of the store. Only :meth:`Store.writer` makes one, inside the writer lock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvtool.core.cache import tables
from kvtool.core.cache.access_log import combine_scores, fold_uses, take_log
from kvtool.core.cache.batch import BATCH_BYTES, Batch
from kvtool.core.cache.collect import Documents, Referred, collect, compact, drop_unfinished
from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry
from kvtool.core.cache.identity import Origin
from kvtool.core.cache.stretches import Place, StretchInfo, info_row, part_row
from kvtool.core.cache.tables import Row, RowKey, chunk_keys, file_row, meta_row, superseded
from kvtool.core.errors import NoSpaceError

if TYPE_CHECKING:
    from kvtool.core.cache.reader import StoreReader


class Writer(Batch):
    """Puts chunks and documents into a store.

    A chunk is stored before the document that needs it, so a document that is there never lacks a chunk. If `needed`,
    which gives the chunks that this run counts on, is set, chunks of unfinished files that are not among them are
    dropped before a commit is refused for lack of room.
    """

    def __init__(self, store: StoreReader, max_size: int | None = None) -> None:
        super().__init__(store, max_size)
        self.documents = Documents(store)
        self.needed: Callable[[], set[bytes]] | None = None
        self._tidied = False  # whether what killed writers left of stretches is dropped

    def commit(
        self, rows: Sequence[Row], deletions: Sequence[RowKey] = (), weighed: bool = True, thins: bool | None = None
    ) -> None:
        self._with_room(lambda: super(Writer, self).commit([*rows, *self.documents.rows()], deletions, weighed, thins))
        self.documents.committed()

    def require_room(self) -> None:
        self._with_room(super().require_room)

    def _with_room(self, work: Callable[[], None]) -> None:
        try:
            work()
        except NoSpaceError:
            if self.needed is None or not drop_unfinished(self, self.documents, self.needed()):
                raise
            work()

    # ---- settings and stretches ----------------------------------------------------------------------------------

    def put_stretch(self, stretch: bytes, info: StretchInfo, parts: Iterable[tuple[Place, bytes]]) -> None:
        """Replace a stretch; durable on return. Parts are taken one after another, a batch a transaction: a writer that
        is killed among them leaves parts that no read finds and `collect` drops. Raises NoSpaceError."""
        self.drop_stretches([stretch], left=not self._tidied)
        self._tidied = True
        rows: list[Row] = []
        for key, payload in parts:
            rows.append(part_row(stretch, key, payload))
            if sum(len(value) for *_, value in rows) >= BATCH_BYTES:
                self.commit(rows)
                rows = []
        self.commit([*rows, info_row(stretch, info)])

    def set_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest. The prompt's former beginning, which no document refers to, is then unreferenced."""
        self.commit([meta_row(tables.MANIFEST_KEY, manifest), meta_row(tables.COLLECTED_KEY, {})])
        self.documents.loose = None
        for path in [*self.documents.unfinished]:  # made with the former one, these are not what their files need
            self.documents.note_unfinished(path)

    def put_profile(self, digest: bytes, data: bytes, state: dict[str, Any] | None = None) -> None:
        self.commit([tables.profile_row(digest, data), *([] if state is None else [meta_row(tables.CODEC_KEY, state)])])

    def set_budget(self, size: int | None) -> None:
        self.commit([meta_row(tables.BUDGET_KEY, {"bytes": size})])

    def set_pins(self, sources: Iterable[str], chunks: Iterable[str]) -> None:
        self.commit([meta_row(tables.PINS_KEY, {"sources": sorted(set(sources)), "chunks": sorted(set(chunks))})])

    def set_codec_state(self, state: dict[str, Any]) -> None:
        self.commit([meta_row(tables.CODEC_KEY, state)])

    # ---- documents -----------------------------------------------------------------------------------------------

    def describe(self, infos: Mapping[bytes, ChunkInfo], origin: Origin | None = None) -> None:
        """Store descriptions of chunks whose KV is elsewhere; durable on return. `origin`: see :meth:`put_chunk`."""
        rows: list[Row] = []
        deletions: set[RowKey] = set()
        with self.store.environment.read() as snapshot:
            for chunk_id, info in sorted(infos.items()):
                rows += tables.info_rows(snapshot, chunk_id, info, origin)
                deletions.update(superseded(snapshot, chunk_id, origin))
        if rows:
            self.commit(rows, sorted(deletions))
            self.fresh.update(infos)

    def begin_file(self, path: str, chunk_ids: Iterable[bytes]) -> None:
        """Note that chunks of a file are put before all of them are there: `collect` does not drop them until the file
        is committed, begun with other chunks, or removed. Durable with the next flush."""
        self._check_open()
        self.documents.own_paths.add(path)
        self.documents.note_unfinished(path, tuple(dict.fromkeys(chunk_ids)))

    def end_unfinished(self, paths: Iterable[str] | None = None) -> None:
        """Drop the notes that files are unfinished, all if none are named; their chunks stay until :meth:`collect`."""
        for path in [*self.documents.unfinished] if paths is None else paths:
            self.documents.note_unfinished(path)
        if self.documents.rows():
            self.commit([])

    def commit_file(self, entry: FileEntry, documents: Sequence[DocumentEntry]) -> None:
        """Store a file with its documents and what is left of their chunks in one transaction; durable on return.

        Chunks that wait for other files go on waiting. Removed documents' chunks stay until :meth:`collect`.
        Raises ValueError: a document names a chunk that was never put, or that was made elsewhere although the file was
        not; the entry names other documents; or one of them is another file's. Raises NoSpaceError: all buffered chunks
        are dropped.
        """
        self.commit_files([(entry, documents)])

    def commit_files(self, files: Sequence[tuple[FileEntry, Sequence[DocumentEntry]]]) -> None:
        """As :meth:`commit_file`, of several files: all of them, or none."""
        documents = [document for _, of_file in files for document in of_file]
        is_hollow = self.documents.check(files, self.waiting)
        deletions: list[RowKey] = []
        for entry, _ in files:
            self.documents.loosen(entry.path)
            self.documents.note_unfinished(entry.path)
            deletions += self.documents.stale_rows(entry.path, entry.documents)
        try:
            rows, replaced = self.take({ref.chunk_id for document in documents for ref in document.chunks})
            rows += [*map(tables.document_row, documents), *(file_row(entry) for entry, _ in files)]
            self.commit(rows, [*deletions, *replaced], thins=is_hollow or None)
        except BaseException:
            self.forget()
            raise
        self.fresh = self.waiting

    def remove_file(self, path: str) -> bool:
        """Remove a file and its documents; their chunks stay until :meth:`collect`. False: it was not there."""
        self.end_unfinished([path])
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
        self.end_unfinished(gone)
        rows: list[Row] = []
        deletions: list[RowKey] = []
        for entry in self.store.files_with(gone):
            self.documents.loosen(entry.path)
            documents = tuple(source for source in entry.documents if source not in gone)
            if documents != entry.documents or (entry.path in gone and not entry.documents):
                deletions += [(tables.DOCUMENTS, tables.name_key(name)) for name in entry.documents if name in gone]
                if documents:
                    rows.append(file_row(replace(entry, documents=documents)))
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

    def collect(self, keep: Iterable[bytes] = (), referred: Referred | None = None) -> int:
        """Drop the chunks that no document and no unfinished file refers to, except `keep`, and fold the access log;
        return how many. `referred` returns those of some chunks that documents refer to. If this writer knows to which
        chunks its documents no longer refer, only these are looked at; else all documents are read. Raises
        DamagedError, and drops nothing, if a document cannot be read."""
        self._check_open()
        self.flush()
        self.fold_access()
        return collect(self, self.documents, keep, referred)

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
