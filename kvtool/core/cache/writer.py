"""The writing side of the store. Only :meth:`Store.writer` makes one, inside the writer lock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from kvtool.core.cache import tables
from kvtool.core.cache.access_log import combine_scores, latest, lrfu_scores, take_log
from kvtool.core.cache.commit import Commits, compact
from kvtool.core.cache.entries import ChunkInfo, DocumentEntry, FileEntry
from kvtool.core.cache.identity import ID_BYTES, Origin
from kvtool.core.cache.record import Bytes
from kvtool.core.cache.stretches import Place, StretchInfo, info_row, left_over, part_row, stretch_keys
from kvtool.core.cache.tables import Row, RowKey, chunk_keys, file_row, meta_row, origin_in, superseded
from kvtool.core.cache.transaction import Snapshot
from kvtool.core.errors import DamagedError, KvtoolError, NoSpaceError

if TYPE_CHECKING:
    from kvtool.core.cache.reader import StoreReader

BATCH_BYTES = 48 * 2**20
BATCH_SECONDS = 5.0
_CHUNKS_AT_ONCE = 2000  # deleted in one transaction
Referred = Callable[[Collection[bytes]], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class _Pending:
    info: ChunkInfo
    layers: tuple[Bytes, ...]
    replace: bool = False
    origin: Origin | None = None


class Writer:
    """Puts chunks and documents into a store. Belongs to one thread.

    A chunk is stored before the document that needs it, so a document that is there never lacks a chunk. So many
    `batch_bytes` of records wait to be written in one transaction, which holds its pages in memory. If `needed`, which
    gives the chunks that this run counts on, is set, chunks of unfinished files that are not among them are dropped
    before a commit is refused for lack of room.
    """

    def __init__(self, store: StoreReader, max_size: int | None = None) -> None:
        self._store = store
        self._commits = Commits(store, max_size)
        self._pending: dict[tuple[bytes, str], _Pending] = {}
        self._pending_bytes = 0
        self._flushed_at = time.monotonic()
        self._fresh: set[bytes] = set()  # put since the last commit_file: collect must not take them for garbage
        self._ended = False
        self._tidied = False  # whether what killed writers left of stretches is dropped
        self._begun = False  # whether documents, or chunks without them, were changed
        self._loosened: set[bytes] | None = None  # chunks that documents no longer refer to; None: there may be others
        self._unfinished: dict[str, tuple[bytes, ...]] | None = None  # as in the store; read when it is first needed
        self._unsaved = False  # whether these were changed since
        self._own: set[str] = set()  # those of this writer
        self.batch_bytes = BATCH_BYTES
        self.needed: Callable[[], set[bytes]] | None = None

    # ---- putting -------------------------------------------------------------------------------------------------

    def put_stretch(self, stretch: bytes, info: StretchInfo, parts: Iterable[tuple[Place, bytes]]) -> None:
        """Replace a stretch; durable on return. Parts are taken one after another, a batch a transaction: a writer that
        is killed among them leaves parts that no read finds and `collect` drops. Raises NoSpaceError."""
        self.drop_stretches([stretch], left=not self._tidied)
        self._tidied = True
        rows: list[Row] = []
        for place, payload in parts:
            rows.append(part_row(stretch, place, payload))
            if sum(len(value) for *_, value in rows) >= BATCH_BYTES:
                self._commit(rows)
                rows = []
        self._commit([*rows, info_row(stretch, info)])

    def drop_stretches(self, stretches: Iterable[bytes], left: bool = True) -> int:
        """Drop these stretches, and what is `left` of others, which takes reading all names. Returns how many rows."""
        with self._store.environment.read() as snapshot:
            deletions = {row for stretch in stretches for row in stretch_keys(snapshot, stretch)}
            deletions |= {*left_over(snapshot)} if left else set()
        if deletions:
            self._commit([], sorted(deletions), weighed=False)
        return len(deletions)

    def set_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace the manifest. The prompt's former beginning, which no document refers to, is then unreferenced."""
        self._commit([meta_row(tables.MANIFEST_KEY, manifest), meta_row(tables.COLLECTED_KEY, {})])
        self._begun, self._loosened = True, None
        for path in [*self._unfinished_files()]:  # made with the former one, these are not what their files need
            self._note_unfinished(path)

    def put_profile(self, digest: bytes, data: bytes, state: dict[str, Any] | None = None) -> None:
        self._commit(
            [tables.profile_row(digest, data), *([] if state is None else [meta_row(tables.CODEC_KEY, state)])]
        )

    def set_budget(self, size: int | None) -> None:
        self._commit([meta_row(tables.BUDGET_KEY, {"bytes": size})])

    def require_room(self) -> None:
        """Raise NoSpaceError if the store is at its budget already: before work whose result would not fit."""
        self._with_room(self._commits.require_room)

    def set_pins(self, sources: Iterable[str], chunks: Iterable[str]) -> None:
        self._commit([meta_row(tables.PINS_KEY, {"sources": sorted(set(sources)), "chunks": sorted(set(chunks))})])

    def set_codec_state(self, state: dict[str, Any]) -> None:
        self._commit([meta_row(tables.CODEC_KEY, state)])

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

        Parameters
        ----------
        layers : one encoded record (:func:`encode_record` with the chunk id as key) for each layer, in order; their
            memory must not change before they are durable.
        replace : also records that are stored and sound; else these stay as they are.
        origin : where the records were made. HERE, or a trusted source, replaces all that a foreign one has put.
            None: the chunk stays of the origin that it has, as when a level of it is made from another.
        made_here : this process has just computed the digests, which are not compared again.
        """
        self._check_open()
        tables.check_layers(chunk_id, info, level, layers, made_here)
        place = (bytes(chunk_id), level)
        if place not in self._pending:
            self._pending[place] = _Pending(info, tuple(layers), replace, origin)
            self._pending_bytes += sum(map(len, layers))
            self._fresh.add(place[0])
        if self._pending_bytes >= self.batch_bytes or time.monotonic() - self._flushed_at > BATCH_SECONDS:
            self.flush()

    def describe(self, infos: Mapping[bytes, ChunkInfo], origin: Origin | None = None) -> None:
        """Store descriptions of chunks whose KV is elsewhere; durable on return. `origin`: see :meth:`put_chunk`."""
        rows: list[Row] = []
        deletions: set[RowKey] = set()
        with self._store.environment.read() as snapshot:
            for chunk_id, info in sorted(infos.items()):
                rows += tables.info_rows(snapshot, chunk_id, info, origin)
                deletions.update(superseded(snapshot, chunk_id, origin))
        if rows:
            self._commit(rows, sorted(deletions))
            self._fresh.update(infos)

    def begin_file(self, path: str, chunk_ids: Iterable[bytes]) -> None:
        """Note that chunks of a file are put before all of them are there: `collect` does not drop them until the file
        is committed, begun with other chunks, or removed. Durable with the next flush."""
        self._check_open()
        self._own.add(path)
        self._note_unfinished(path, tuple(dict.fromkeys(chunk_ids)))

    def end_unfinished(self, paths: Iterable[str] | None = None) -> None:
        """Drop the notes that files are unfinished, all if none are named; their chunks stay until :meth:`collect`."""
        for path in [*self._unfinished_files()] if paths is None else paths:
            self._note_unfinished(path)
        if self._unsaved:
            self._commit([])

    def has_chunk(self, chunk_id: bytes) -> bool:
        return any(waiting == chunk_id for waiting, _ in self._pending) or self._store.has_chunk(chunk_id)

    def has_level(self, chunk_id: bytes, level: str) -> bool:
        return (chunk_id, level) in self._pending or level in self._store.sizes_here(chunk_id)

    def spend_reserve(self) -> None:
        """Let what follows take of the disk's reserve: it is small, and more is dropped as soon as it is there."""
        self._commits.keeps_reserve = False

    def flush(self) -> None:
        """Make all buffered chunks durable; if that fails they are forgotten, as if never put."""
        try:
            if self._pending:
                rows, deletions = self._pending_rows()
                if any(table == tables.ADDED for table, *_ in rows):  # a kill now leaves chunks that nothing refers to
                    self._begin()
                    rows.append(meta_row(tables.COLLECTED_KEY, {}))
                self._commit(rows, deletions)
        finally:
            self._forget_pending()

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
        for entry, of_file in files:
            if sorted(entry.documents) != sorted(document.source for document in of_file):
                raise ValueError("a file entry must name exactly its documents")
            self._check_owner(entry)
        needed = {ref.chunk_id for document in documents for ref in document.chunks}
        own = {ref.chunk_id for entry, of in files if not entry.origin.is_foreign for one in of for ref in one.chunks}
        hollow = self._check_references(needed, own)
        others = {place: pending for place, pending in self._pending.items() if place[0] not in needed}
        deletions: list[RowKey] = []
        for entry, _ in files:
            self._loosen(entry.path)
            self._note_unfinished(entry.path)
            deletions += self._stale_documents(entry.path, set(entry.documents))
        try:
            rows, replaced = self._pending_rows(needed)
            rows += [*map(tables.document_row, documents), *(file_row(entry) for entry, _ in files)]
            self._commit(rows, [*deletions, *replaced], thins=hollow or None)
        except BaseException:
            others = {}
            raise
        finally:
            self._forget_pending()
            self._pending = others
            self._pending_bytes = sum(len(layer) for pending in others.values() for layer in pending.layers)
        self._fresh = {chunk_id for chunk_id, _ in others}

    def remove_file(self, path: str) -> bool:
        """Remove a file and its documents; their chunks stay until :meth:`collect`. False: it was not there."""
        self.end_unfinished([path])
        key = tables.name_key(path)
        with self._store.environment.read() as snapshot:
            if not snapshot.has(tables.FILES, key):
                return False
        self._loosen(path)
        self._commit([], [(tables.FILES, key), *self._stale_documents(path, set())])
        return True

    def remove_documents(self, sources: Iterable[str]) -> int:
        """Remove documents, and files that have none left; their chunks stay until :meth:`collect`. A file that never
        had one is named by its path. Returns how many documents were there."""
        gone = set(sources)
        self.end_unfinished(gone)
        rows: list[Row] = []
        deletions: list[RowKey] = []
        for entry in self._store.files_with(gone):
            self._loosen(entry.path)
            kept = tuple(source for source in entry.documents if source not in gone)
            if kept != entry.documents or (entry.path in gone and not entry.documents):
                deletions += [(tables.DOCUMENTS, tables.name_key(name)) for name in entry.documents if name in gone]
                if kept:
                    rows.append(file_row(replace(entry, documents=kept)))
                else:
                    deletions.append((tables.FILES, tables.name_key(entry.path)))
        if deletions:
            self._commit(rows, deletions, weighed=False)
        return sum(table == tables.DOCUMENTS for table, _ in deletions)

    # ---- dropping ------------------------------------------------------------------------------------------------

    def drop_level(self, chunk_ids: Iterable[bytes], level: str) -> int:
        return self._drop(chunk_ids, lambda snapshot, chunk_id: tables.level_keys(snapshot, chunk_id, level))

    def drop_chunks(self, chunk_ids: Iterable[bytes]) -> int:
        return self._drop(chunk_ids, chunk_keys)

    def _drop(
        self, chunk_ids: Iterable[bytes], keys_of: Callable[[Snapshot, bytes], list[RowKey]], thins: bool | None = None
    ) -> int:
        dropped, left = 0, iter(chunk_ids)
        while batch := list(islice(left, _CHUNKS_AT_ONCE)):
            with self._store.environment.read() as snapshot:
                deletions = [keys_of(snapshot, chunk_id) for chunk_id in batch]
            dropped += sum(map(bool, deletions))
            self._commit([], [*chain.from_iterable(deletions)], thins=thins)
        return dropped

    def drop_profiles(self, digests: Iterable[bytes], state: dict[str, Any] | None = None) -> int:
        with self._store.environment.read() as snapshot:
            deletions = [(tables.PROFILES, digest) for digest in digests if snapshot.has(tables.PROFILES, digest)]
        if deletions:
            self._commit([] if state is None else [meta_row(tables.CODEC_KEY, state)], deletions)
        return len(deletions)

    def collect(self, keep: Iterable[bytes] = (), referred: Referred | None = None) -> int:
        """Drop the chunks that no document and no unfinished file refers to, except `keep`, and fold the access log;
        return how many. `referred` returns those of some chunks that documents refer to. If this writer knows to which
        chunks its documents no longer refer, only these are looked at; else all documents are read. Raises
        DamagedError, and drops nothing, if a document cannot be read."""
        self._check_open()
        self.flush()
        self.fold_access()
        self._begin()
        kept = {*keep} | self._fresh | {chunk for ids in self._unfinished_files().values() for chunk in ids}
        if referred is None or self._loosened is None:
            loose = self._unreferred(kept)
        else:
            loose = self._loosened - kept
            loose -= {*referred(loose)} if loose else set()
            loose |= self._drop_stretches_of(lambda info: not loose.isdisjoint(info.chunks))
        dropped = self._drop(sorted(loose), chunk_keys, thins=False)  # no document has any of them
        if not self._store.is_collected():  # only now: after a kill the next writer does it
            self._commit([meta_row(tables.COLLECTED_KEY, {"documents": self._store.documents_revision()})])
        self._loosened = set()
        return dropped

    def _unreferred(self, kept: set[bytes]) -> set[bytes]:
        """List the chunks that nothing refers to, but `kept`; stretches made of any such chunk are dropped."""
        wanted = {ref.chunk_id for document in self._store.documents() for ref in document.chunks} | kept
        self._drop_stretches_of(lambda info: not wanted.issuperset(info.chunks))
        wanted |= {*self._store.stretches()}
        with self._store.environment.read() as snapshot:
            return {key[:ID_BYTES] for table in tables.BY_CHUNK for key in snapshot.keys(table)} - wanted

    def _drop_stretches_of(self, is_stale: Callable[[StretchInfo], bool]) -> set[bytes]:
        stale = {stretch for stretch, info in self._store.stretches().items() if is_stale(info)}
        self.drop_stretches(stale)
        return stale

    def _begin(self) -> None:
        if not self._begun:
            self._begun, self._loosened = True, set() if self._store.is_collected() else None

    def _loosen(self, path: str) -> None:
        """Note the chunks of a file's documents before these change: no other document may refer to them."""
        self._begin()
        if self._loosened is None:
            return
        try:
            entry = self._store.file(path)
            for source in entry.documents if entry is not None else ():
                document = self._store.document(source)
                self._loosened.update(ref.chunk_id for ref in (document.chunks if document is not None else ()))
        except DamagedError:  # what it refers to is unknown
            self._loosened = None

    def _unfinished_files(self) -> dict[str, tuple[bytes, ...]]:
        if self._unfinished is None:
            self._unfinished = self._store.unfinished()
        return self._unfinished

    def _note_unfinished(self, path: str, chunk_ids: tuple[bytes, ...] = ()) -> None:
        files = self._unfinished_files()
        before = files.pop(path, ())
        if chunk_ids:
            files[path] = chunk_ids
        if before == chunk_ids:
            return
        self._unsaved = True
        self._begin()
        if self._loosened is not None:
            self._loosened.update(before)

    def _unfinished_rows(self) -> list[Row]:
        packed = {path: b"".join(ids).hex() for path, ids in self._unfinished_files().items()} if self._unsaved else {}
        return [meta_row(tables.UNFINISHED_KEY, packed)] if self._unsaved else []

    def _drop_unfinished(self) -> bool:
        others = self._unfinished_files().keys() - self._own
        if self.needed is None or not others:
            return False
        self._begin()
        self.end_unfinished(others)
        kept = self.needed() | self._fresh | {chunk for ids in self._unfinished_files().values() for chunk in ids}
        return self._drop(sorted(self._unreferred(kept)), chunk_keys, thins=False) > 0

    def mend(self, rows: Sequence[Row], deletions: Sequence[RowKey]) -> None:
        if rows or deletions:
            self._commit(rows, deletions, weighed=False)

    def compact(self) -> int:
        self._check_open()
        self.flush()
        return compact(self._store)

    def end(self) -> None:
        self._forget_pending()
        self._ended = True

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _pending_rows(self, only: set[bytes] | None = None) -> tuple[list[Row], list[RowKey]]:
        rows: list[Row] = []
        deletions: set[RowKey] = set()
        with self._store.environment.read() as snapshot:
            for (chunk_id, level), pending in sorted(self._pending.items(), key=itemgetter(0)):
                if only is not None and chunk_id not in only:
                    continue
                origin = pending.origin
                rows += tables.level_rows(
                    snapshot, chunk_id, pending.info, level, pending.layers, pending.replace, origin
                )
                deletions.update(superseded(snapshot, chunk_id, origin))
        return rows, sorted(deletions)

    def _stale_documents(self, path: str, kept: set[str]) -> list[RowKey]:
        try:
            old = self._store.file(path)
        except DamagedError:  # replaced now; its documents are found again by verify
            old = None
        stale = [source for source in (old.documents if old else ()) if source not in kept]
        return [(tables.DOCUMENTS, tables.name_key(s)) for s in stale if self._other_owner(path, s) is None]

    def _check_owner(self, entry: FileEntry) -> None:
        for source in entry.documents if entry.origin.is_foreign else ():
            if (other := self._other_owner(entry.path, source)) is not None:
                raise ValueError(f"document {source} is one of {other}")

    def _other_owner(self, path: str, source: str) -> str | None:
        marks = (at for at, character in enumerate(source) if character == "#")  # a document's own name may have some
        for other in {source, *(source[:at] for at in marks)} - {path, ""}:
            with contextlib.suppress(DamagedError):
                entry = self._store.file(other)
                if entry is not None and source in entry.documents:
                    return other
        return None

    def _check_references(self, chunk_ids: Iterable[bytes], own: Collection[bytes]) -> bool:
        """Refuse chunks never put, and foreign ones among those of own files. True: some lack their KV."""
        hollow = False
        waiting = {chunk_id for chunk_id, _ in self._pending}
        with self._store.environment.read() as snapshot:
            for chunk_id in sorted({*chunk_ids} - waiting):  # neighbours are on one page
                if not snapshot.has(tables.CHUNKS, chunk_id):
                    raise ValueError(f"chunk {chunk_id.hex()} was never put")
                if chunk_id in own and origin_in(snapshot, chunk_id).is_foreign:
                    raise ValueError(f"chunk {chunk_id.hex()} was made elsewhere")
                hollow = hollow or not self._store.has_chunk(chunk_id)
        return hollow

    def fold_access(self) -> None:
        self._store.flush()
        uses, aside = take_log(self._store.path)
        before, scores = self._store.folded_uses(), self._store.folded_warmth()
        newer = {chunk_id: when for chunk_id, when in latest(uses).items() if when > before.get(chunk_id, -1)}
        warmer = {chunk: round(combine_scores(scores.get(chunk, 0), one)) for chunk, one in lrfu_scores(uses).items()}
        times = {tables.USED: newer, tables.WARM: warmer}
        rows = [(table, key, tables.seal_number(key, when)) for table, of in times.items() for key, when in of.items()]
        if rows:
            self._commit(rows)
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)

    # ---- committing ----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._ended:
            raise KvtoolError("this writer has ended")

    def _forget_pending(self) -> None:
        self._pending.clear()
        self._pending_bytes = 0
        self._flushed_at = time.monotonic()

    def _commit(
        self, rows: Sequence[Row], deletions: Sequence[RowKey] = (), weighed: bool = True, thins: bool | None = None
    ) -> None:
        self._check_open()
        self._with_room(lambda: self._commits.commit([*rows, *self._unfinished_rows()], deletions, weighed, thins))
        self._unsaved = False

    def _with_room(self, work: Callable[[], None]) -> None:
        try:
            work()
        except NoSpaceError:
            if not self._drop_unfinished():
                raise
            work()
