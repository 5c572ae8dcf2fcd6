"""Reading what was ingested: files, and the documents that they gave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from kvtool.core.cache import keys, tables
from kvtool.core.cache.entries import DocumentEntry, FileEntry
from kvtool.core.cache.opened import Opened
from kvtool.core.cache.record import Kind
from kvtool.core.cache.snapshot import checked_payload
from kvtool.core.errors import DamagedError


class Documents(Opened):
    """The part of :class:`kvtool.core.cache.store.Store` that reads the tables of files and documents."""

    def files(self) -> Iterator[FileEntry]:
        """All files by path. Raises DamagedError."""
        with self.snapshot() as snapshot:
            rows = list(snapshot.items(tables.FILES))
        entries = [FileEntry.from_bytes(checked_payload(key, Kind.FILE, data, "a file entry")) for key, data in rows]
        return iter(sorted(entries, key=lambda entry: entry.path))

    def file(self, path: str) -> FileEntry | None:
        """The file as last ingested. Raises DamagedError."""
        return self.file_at(keys.name_key(path))

    def file_at(self, key: bytes) -> FileEntry | None:
        """The file of a key of :meth:`file_marks`. Raises DamagedError."""
        with self.snapshot() as snapshot:
            payload = snapshot.payload(tables.FILES, key, Kind.FILE, "a file entry")
        return None if payload is None else FileEntry.from_bytes(payload)

    def files_with(self, sources: Iterable[str]) -> list[FileEntry]:
        """The files of these documents, by path; a file without documents is its own. A document is looked for where
        readers put it, in the file of its own name or of what stands before its last `#`; only for others all files
        are read. Raises DamagedError."""
        found: dict[str, FileEntry] = {}
        lost: set[str] = set()
        for source in sources:
            entries = (self.file(path) for path in (source, source.rpartition("#")[0]) if path)
            for entry in entries:
                if entry is not None and source in (entry.documents or (entry.path,)):
                    found[entry.path] = entry
                    break
            else:
                lost.add(source)
        if lost:
            found |= {
                entry.path: entry for entry in self.files() if not lost.isdisjoint((entry.path, *entry.documents))
            }
        return [found[path] for path in sorted(found)]

    def origin_of(self, source: str) -> str:
        """Name the pack, store or signer that a document came from; "" for one that was ingested here."""
        with suppress(DamagedError):
            return next((entry.origin.name for entry in self.files_with([source])), "")
        return ""

    def file_marks(self) -> dict[bytes, bytes]:
        """A mark of every file's entry, by key: another mark, and something of the entry is another."""
        with self.snapshot() as snapshot:
            return {key: keys.mark_of(data) for key, data in snapshot.items(tables.FILES)}

    def document(self, source: str) -> DocumentEntry | None:
        """The document of this source. Raises DamagedError."""
        payload = self.document_bytes(source)
        return None if payload is None else DocumentEntry.from_bytes(payload)

    def document_bytes(self, source: str) -> memoryview | None:
        """The document of this source as :meth:`DocumentEntry.to_bytes` gave it. Raises DamagedError."""
        with self.snapshot() as snapshot:
            return snapshot.payload(tables.DOCUMENTS, keys.name_key(source), Kind.DOCUMENT, "a document")

    def document_mark(self, source: str) -> bytes | None:
        """A mark of a document's entry, as of files; None: there is none."""
        with self.snapshot() as snapshot:
            data = snapshot.get(tables.DOCUMENTS, keys.name_key(source))
        return None if data is None else keys.mark_of(data)

    def documents(self) -> Iterator[DocumentEntry]:
        """All documents by source, one transaction each."""
        return (entry for source in self.sources() if (entry := self.document(source)) is not None)

    def sources(self) -> list[str]:
        """Sources of all documents, sorted."""
        return sorted({source for entry in self.files() for source in entry.documents})
