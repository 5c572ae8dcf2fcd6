"""What gives space back: the references of documents to chunks, which a garbage collection follows; compaction into the
next generation of the data file; and the removal of what killed processes have left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Set
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.cache import layout, tables
from kvtool.core.cache.entries import DocumentEntry, FileEntry
from kvtool.core.cache.tables import RowKey, origin_in
from kvtool.core.cache.tree import check_data_file
from kvtool.core.errors import DamagedError

if TYPE_CHECKING:
    from kvtool.core.cache.reader import StoreReader

_UNNAMED = re.compile(r"\.(tmp|.+)-\d+-[0-9a-f]{8}")  # see layout.atomic_write, retrieval/tables.py
_LEFT_SECONDS = 600.0  # a younger one may be another process's, about to be renamed


class Documents:
    """Which chunks documents hold, and which they have let go since the last collection.

    `loose`: chunks that documents no longer refer to; None: there may be others.
    """

    def __init__(self, store: StoreReader) -> None:
        self._store = store
        self.loose: set[bytes] | None = set() if store.is_collected() else None

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

    def check(self, files: Iterable[tuple[FileEntry, Collection[DocumentEntry]]], waiting: Set[bytes]) -> None:
        """Raise ValueError if files cannot be committed: see :meth:`Writer.commit_file`. `waiting`: chunks that are put
        or described, and not stored."""
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
        self._check_references(needed - waiting, local)

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

    def _check_references(self, chunk_ids: Iterable[bytes], local: Set[bytes]) -> None:
        """Refuse chunks never put, and foreign ones among those of `local` files."""
        with self._store.environment.read() as snapshot:
            for chunk_id in sorted(chunk_ids):  # neighbours are on one page
                if not snapshot.has(tables.CHUNKS, chunk_id):
                    raise ValueError(f"chunk {chunk_id.hex()} was never put")
                if chunk_id in local and origin_in(snapshot, chunk_id).is_foreign:
                    raise ValueError(f"chunk {chunk_id.hex()} was made elsewhere")


def compact(store: StoreReader) -> int:
    """Copy the live pages into the next generation, switch the pointer, remove the old one; return the bytes given back
    to the disk. Writer lock held. Readers keep the old generation until they look at the pointer."""
    old = store.environment
    before = old.file_bytes()
    with store.snapshot() as snapshot:
        live = snapshot.live_bytes()
    layout.check_copy(old.generation, live, before)
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
