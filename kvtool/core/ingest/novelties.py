"""New chunks of a run; needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.store import Store
from kvtool.core.ingest.prepare import PreparedFile


class Novelties:
    """Tells which chunks neither the store nor an earlier file of this run has.

    Attributes
    ----------
    reused : how many different chunks were stored already.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._seen: set[bytes] = set()
        self.reused = 0

    def of(self, file: PreparedFile) -> list[ChunkSpec]:
        """List the chunks of a file that are new, once each, in order."""
        first = {chunk.chunk_id: chunk for chunk in file.chunks if chunk.chunk_id not in self._seen}
        self._seen.update(first)
        new = [chunk for key, chunk in first.items() if self._store is None or not self._store.serves_own(key)]
        self.reused += len(first) - len(new)
        return new

    def orphaned(self, paths: Collection[str], keep: bytes) -> int:
        """Count the stored chunks that nothing will refer to once what was asked about here is in its place.

        Parameters
        ----------
        paths : of files that are gone, or replaced.
        keep : the prompt's own beginning, which no document has.

        Raises
        ------
        DamagedError : a document is damaged, so what it refers to is unknown.
        """
        if self._store is None:
            return 0
        going = {source for entry in self._store.files() if entry.path in paths for source in entry.documents}
        staying = (document for document in self._store.documents() if document.source not in going)
        wanted = {ref.chunk_id for document in staying for ref in document.chunks} | self._seen | {keep}
        wanted |= {chunk for path, ids in self._store.unfinished().items() if path not in paths for chunk in ids}
        return sum(chunk_id not in wanted for chunk_id in self._store.chunk_ids())

    @property
    def seen(self) -> set[bytes]:
        """A copy of the ids of all chunks that were asked about."""
        return self._seen.copy()

    def take_back(self, new: Iterable[ChunkSpec]) -> None:
        """Forget new chunks that are not made after all: they are new in a later file, too."""
        self._seen.difference_update(chunk.chunk_id for chunk in new)
