"""What gives space back: garbage collection of chunks, compaction into the next generation of the data file, and the
removal of what killed processes have left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.cache import layout, space, tables
from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.stretches import StretchInfo
from kvtool.core.cache.tables import chunk_keys, meta_row
from kvtool.core.cache.tree import check_data_file

if TYPE_CHECKING:
    from kvtool.core.cache.batch import Batch
    from kvtool.core.cache.documents import Documents
    from kvtool.core.cache.reader import StoreReader

Referred = Callable[[Collection[bytes]], Iterable[bytes]]
_UNNAMED = re.compile(r"\.(tmp|.+)-\d+-[0-9a-f]{8}")  # see layout.atomic_write, retrieval/tables.py
_LEFT_SECONDS = 600.0  # a younger one may be another process's, about to be renamed


def collect(batch: Batch, documents: Documents, keep: Iterable[bytes], referred: Referred | None) -> int:
    """Drop the chunks that no document and no unfinished file refers to, except `keep`, and return how many; see
    :meth:`Writer.collect` for `referred`."""
    live = {*keep} | batch.fresh | documents.unfinished_chunks()
    if referred is None or documents.loose is None:
        loose = _unreferred(batch, live)
    else:
        loose = documents.loose - live
        loose -= {*referred(loose)} if loose else set()
        loose |= _drop_stretches_of(batch, lambda info: not loose.isdisjoint(info.chunks))
    dropped = batch.drop(sorted(loose), chunk_keys, thins=False)  # no document has any of them
    if not batch.store.is_collected():  # only now: after a kill the next writer does it
        batch.commit([meta_row(tables.COLLECTED_KEY, {"documents": batch.store.documents_revision()})])
    documents.loose = set()
    return dropped


def drop_unfinished(batch: Batch, documents: Documents, needed: Iterable[bytes]) -> bool:
    """Drop the chunks of unfinished files that other writers began, except `needed`. False: there were none."""
    paths = documents.unfinished.keys() - documents.own_paths
    if not paths:
        return False
    for path in paths:
        documents.note_unfinished(path)
    batch.commit([])  # the list of unfinished files
    live = {*needed} | batch.fresh | documents.unfinished_chunks()
    return batch.drop(sorted(_unreferred(batch, live)), chunk_keys, thins=False) > 0


def _unreferred(batch: Batch, live: set[bytes]) -> set[bytes]:
    """List the chunks that nothing refers to, but the `live` ones; stretches made of any such chunk are dropped."""
    store = batch.store
    live = live | {ref.chunk_id for document in store.documents() for ref in document.chunks}
    _drop_stretches_of(batch, lambda info: not live.issuperset(info.chunks))
    with store.environment.read() as snapshot:
        ids = {key[:ID_BYTES] for table in tables.BY_CHUNK for key in snapshot.keys(table)}
    return ids - live - {*store.stretches()}


def _drop_stretches_of(batch: Batch, is_stale: Callable[[StretchInfo], bool]) -> set[bytes]:
    stale = {stretch for stretch, info in batch.store.stretches().items() if is_stale(info)}
    batch.drop_stretches(stale)
    return stale


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
