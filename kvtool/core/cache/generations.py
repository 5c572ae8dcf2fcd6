"""Generations of a store's data file: compacting makes the next one, and what is old or left behind goes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.cache import layout, space
from kvtool.core.cache.tree_check import check_data_file

if TYPE_CHECKING:
    from kvtool.core.cache.reader import StoreReader

_UNNAMED = re.compile(r"\.(tmp|.+)-\d+-[0-9a-f]{8}")  # see layout.atomic_write, retrieval/tables.py
_LEFT_SECONDS = 600.0  # a younger one may be another process's, about to be renamed


def compact(store: StoreReader) -> int:
    """Copy the live pages into the next generation, switch the pointer, remove the old one. Writer lock held.

    Processes that read the old generation keep it until they look at the pointer; LMDB files are never replaced.
    Returns the bytes given back to the disk.
    """
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
        _sync_file(fresh / "data.mdb")
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


def _sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
    """Remove what a compaction, or one that was killed, has left. Writer lock held."""
    current = layout.current_generation(root)
    if current is None or not current.exists():
        return
    for folder in current.parent.iterdir():
        if folder != current and folder.name.startswith("gen-"):
            shutil.rmtree(folder, ignore_errors=True)
