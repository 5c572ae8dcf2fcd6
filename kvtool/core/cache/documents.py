"""What the documents and the unfinished files of a store hold, as its writer changes them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Set
from typing import TYPE_CHECKING

from kvtool.core.cache import tables
from kvtool.core.cache.entries import DocumentEntry, FileEntry
from kvtool.core.cache.tables import Row, RowKey, meta_row, origin_in
from kvtool.core.errors import DamagedError

if TYPE_CHECKING:
    from kvtool.core.cache.reader import StoreReader


class Documents:
    """Which chunks documents hold, and which they have let go since the last collection.

    `loose`: chunks that documents no longer refer to; None: there may be others. `unfinished`: paths of files of which
    only some chunks are stored, with the ids of all of them. `own_paths`: those of this writer.
    """

    def __init__(self, store: StoreReader) -> None:
        self._store = store
        self.loose: set[bytes] | None = set() if store.is_collected() else None
        self.unfinished = store.unfinished()
        self.own_paths: set[str] = set()
        self._stored = dict(self.unfinished)

    # ---- unfinished files ----------------------------------------------------------------------------------------

    def note_unfinished(self, path: str, chunk_ids: tuple[bytes, ...] = ()) -> None:
        """Note the chunks of an unfinished file; none: it is no longer unfinished."""
        before = self.unfinished.pop(path, ())
        if chunk_ids:
            self.unfinished[path] = chunk_ids
        if before != chunk_ids and self.loose is not None:
            self.loose.update(before)

    def unfinished_chunks(self) -> set[bytes]:
        return {chunk for ids in self.unfinished.values() for chunk in ids}

    def rows(self) -> list[Row]:
        """Make the row of unfinished files, if they differ from those in the store."""
        if self.unfinished == self._stored:
            return []
        return [meta_row(tables.UNFINISHED_KEY, {path: b"".join(ids).hex() for path, ids in self.unfinished.items()})]

    def committed(self) -> None:
        self._stored = dict(self.unfinished)

    # ---- documents -----------------------------------------------------------------------------------------------

    def loosen(self, path: str) -> None:
        """Note the chunks of a file's documents before these change: no other document may refer to them."""
        if self.loose is None:
            return
        try:
            entry = self._store.file(path)
            for source in entry.documents if entry is not None else ():
                document = self._store.document(source)
                self.loose.update(ref.chunk_id for ref in (document.chunks if document is not None else ()))
        except DamagedError:  # what it refers to is unknown
            self.loose = None

    def check(self, files: Iterable[tuple[FileEntry, Collection[DocumentEntry]]], waiting: Set[bytes]) -> bool:
        """Raise ValueError if files cannot be committed: see :meth:`Writer.commit_file`. `waiting`: chunks that are put
        and not stored. True: some stored chunks lack their KV."""
        needed, local = set[bytes](), set[bytes]()
        for entry, documents in files:
            if sorted(entry.documents) != sorted(document.source for document in documents):
                raise ValueError("a file entry must name exactly its documents")
            for source in entry.documents if entry.origin.is_foreign else ():
                if (other := self._other_owner(entry.path, source)) is not None:
                    raise ValueError(f"document {source} is one of {other}")
            chunks = {ref.chunk_id for document in documents for ref in document.chunks}
            needed |= chunks
            local |= set() if entry.origin.is_foreign else chunks
        return self._check_references(needed - waiting, local)

    def stale_rows(self, path: str, sources: Collection[str]) -> list[RowKey]:
        """List the rows of a file's documents that are not among its new `sources`."""
        try:
            old = self._store.file(path)
        except DamagedError:  # replaced now; its documents are found again by verify
            old = None
        stale = [source for source in (old.documents if old else ()) if source not in sources]
        return [(tables.DOCUMENTS, tables.name_key(s)) for s in stale if self._other_owner(path, s) is None]

    def _other_owner(self, path: str, source: str) -> str | None:
        marks = (at for at, character in enumerate(source) if character == "#")  # a document's own name may have some
        for other in {source, *(source[:at] for at in marks)} - {path, ""}:
            with contextlib.suppress(DamagedError):
                entry = self._store.file(other)
                if entry is not None and source in entry.documents:
                    return other
        return None

    def _check_references(self, chunk_ids: Iterable[bytes], local: Set[bytes]) -> bool:
        """Refuse chunks never put, and foreign ones among those of `local` files. True: some lack their KV."""
        hollow = False
        with self._store.environment.read() as snapshot:
            for chunk_id in sorted(chunk_ids):  # neighbours are on one page
                if not snapshot.has(tables.CHUNKS, chunk_id):
                    raise ValueError(f"chunk {chunk_id.hex()} was never put")
                if chunk_id in local and origin_in(snapshot, chunk_id).is_foreign:
                    raise ValueError(f"chunk {chunk_id.hex()} was made elsewhere")
                hollow = hollow or not self._store.has_chunk(chunk_id)
        return hollow
