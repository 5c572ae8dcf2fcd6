"""The reading side of a store: its documents, chunks and states, and the notes of when they were used."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtool.core.cache import keys, layout, tables
from kvtool.core.cache.chunks import Chunks
from kvtool.core.cache.documents import Documents
from kvtool.core.cache.facts import Facts
from kvtool.core.cache.notes import AccessLog, Served, ServedLog, latest, read_log
from kvtool.core.cache.side import read_json, write_json
from kvtool.core.cache.stretches import Stretches
from kvtool.core.cache.warmth import joined, warmths
from kvtool.core.errors import DamagedError, NoSpaceError

_NOTES_SECONDS = 5.0  # what a long session that is killed forgets at most


class StoreReader(Facts, Documents, Chunks, Stretches):
    """Reads a folder of KV records, documents and chunks.

    Every read is its own short transaction, or part of a :meth:`view`: what comes out is a private copy whose digest
    was checked. Readers never wait for a writer. Thread-safe. Not usable across fork.

    Attributes
    ----------
    link : what stands behind the folder, and has more of its KV; None: nothing.
    """

    def __init__(self, path: Path, uuid: str) -> None:
        """Use :meth:`Store.open` or :meth:`Store.create_or_open`."""
        super().__init__(path, uuid)
        self._flushed_at = time.monotonic()
        self._access = AccessLog(path, enabled=not self.read_only)
        self._served = ServedLog(path, enabled=not self.read_only)

    @property
    def is_front(self) -> bool:
        """Return True for the local store of a shared store: all of its KV can be fetched again."""
        return (self.path / layout.REMOTE_FOLDER).is_dir()

    # ---- the folder ----------------------------------------------------------------------------------------------

    def concerns(self) -> list[str]:
        """Permissions that a careful owner would want to change."""
        return layout.concerns(self.path)

    def side_file(self, name: str) -> Path:
        """Path for ``gate/…`` or ``index/…``, its folder made; write it with :func:`layout.atomic_write`."""
        return layout.side_file(self.path, name)

    def write_side(self, name: str, value: dict[str, Any]) -> bool:
        """Write a JSON object next to the records, as ``folder/name``; it can be made again.

        Returns
        -------
        False: it could not be written, such as to a read-only store.
        """
        if self.read_only:
            return False
        try:
            write_json(self.side_file(name), value)
        except (OSError, NoSpaceError):
            return False
        return True

    def read_side(self, name: str, **marks: Any) -> dict[str, Any]:
        """Read a JSON object that is next to the records; see :func:`read_json`."""
        return read_json(self.side_file(name), **marks)

    def unfinished_chunks(self) -> set[bytes]:
        """Return the ids of the chunks that are stored of unfinished files and that no document refers to.

        Raises
        ------
        DamagedError : a document cannot be read, so what it refers to is unknown.
        """
        wanted = {chunk for ids in self.unfinished().values() for chunk in ids}
        wanted = wanted.intersection(self.chunk_ids()) if wanted else wanted
        return wanted - {ref.chunk_id for document in self.documents() for ref in document.chunks} if wanted else wanted

    # ---- notes of use --------------------------------------------------------------------------------------------

    def note_access(self, chunk_ids: Sequence[bytes], missed: int = 0, again: bool = False) -> None:
        """Remember that a question used these chunks now, and how many it missed; takes no lock, and does nothing on a
        read-only store. What a link fetched for the question is written. `again`: the question is counted already."""
        self.note_use(chunk_ids)
        if not again:
            self._served.note(len(chunk_ids), missed)
        if time.monotonic() - self._flushed_at > _NOTES_SECONDS:
            self.flush()
        if self.link is not None:
            self.link.keep_fetched()

    def note_use(self, chunk_ids: Sequence[bytes]) -> None:
        """Remember that these chunks were used, though they were not found: computed for a question, and stored now."""
        self._access.note(chunk_ids)

    @property
    def notes_are_long(self) -> bool:
        """Return True if a writer should fold the notes into the store."""
        return self._access.is_long

    def flush(self) -> None:
        """Write the access notes now instead of within seconds, or at close."""
        self._flushed_at = time.monotonic()
        self._access.flush()
        self._served.flush()

    def served(self) -> Served:
        """Return the counts of what questions found in the store, as far as they are on disk."""
        return self._served.total()

    def last_used(self) -> dict[bytes, int]:
        """Chunk id → when it was last used (seconds since 1970): what is stored, and what is only noted so far, by
        this process or by others. Chunks that were never used are not in it."""
        self._access.flush()
        times = latest(read_log(self.path))  # before the store: a writer may be folding it
        for chunk_id, when in self.folded_uses().items():
            times[chunk_id] = max(times.get(chunk_id, 0), when)
        return times

    def folded_uses(self) -> dict[bytes, int]:
        """Chunk id → when it was last used, as far as a writer has folded the notes into the store."""
        return self._times(tables.USED)

    def warmth(self) -> dict[bytes, float]:
        """Chunk id → how warm it is (`cache/warmth.py`), of what is stored and what is only noted so far. Chunks that
        were never used are not in it; what older versions folded counts as used once."""
        self._access.flush()
        warm = warmths(read_log(self.path))  # before the store: a writer may be folding it
        for chunk_id, before in self.folded_warmth().items():
            warm[chunk_id] = joined(warm.get(chunk_id, 0.0), before)
        return warm

    def folded_warmth(self) -> dict[bytes, int]:
        """Chunk id → how warm it is, as far as a writer has folded the notes into the store."""
        warm = dict[bytes, int](self.folded_uses())
        for chunk_id, of in self._times(tables.WARM).items():
            warm[chunk_id] = max(warm.get(chunk_id, 0), of)
        return warm

    def added(self) -> dict[bytes, int]:
        """Chunk id → seconds at which it came into this store; chunks of older stores are missing."""
        return self._times(tables.ADDED)

    def _times(self, table: bytes) -> dict[bytes, int]:
        times: dict[bytes, int] = {}
        with self.snapshot() as snapshot:
            for key, data in snapshot.items(table):
                with contextlib.suppress(DamagedError):  # only the order of eviction hangs on it
                    times[key] = keys.unseal_number(key, data)
        return times
