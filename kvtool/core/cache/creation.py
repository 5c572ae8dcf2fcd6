"""Making a store, in an order that a kill at any point leaves either no store or a whole one."""

from __future__ import annotations

import shutil
from pathlib import Path

import lmdb

from kvtool.core.cache import keys, layout, tables
from kvtool.core.cache.entries import dump_json
from kvtool.core.cache.lmdb_map import LOCK_FILE_BYTES, open_lmdb
from kvtool.core.cache.lock import writer_lock
from kvtool.core.cache.record import Kind, seal
from kvtool.core.errors import KvtoolError, NoSpaceError, StoreFormatError, StoreNotFoundError

_CREATE_WAIT = 10.0  # seconds for two processes that make the same store


def create_if_missing(root: Path) -> None:
    """Make the store's folder and its empty first generation, unless they are there."""
    if _is_whole(root):
        return
    if root.exists() and not root.is_dir():
        raise StoreFormatError(f"{root} is a file, not a store's folder", "name a folder with --store")
    try:
        layout.make_folder(root)
        layout.check_foreign(root)
        with writer_lock(root, _CREATE_WAIT):
            if not _is_whole(root):
                _create(root)
    except OSError as error:
        raise KvtoolError(
            f"cannot make a store at {root}: {error.strerror}",
            "name another folder with --store, or for copies of shared stores with KVTOOL_CACHE",
        ) from error


def _is_whole(root: Path) -> bool:
    try:
        layout.read_store_file(root)
    except StoreNotFoundError:
        return False
    return layout.current_generation(root) is not None and (root / layout.DATA_FOLDER).exists()


def _create(root: Path) -> None:
    """store.json, the first generation under another name, the pointer, and last data/ itself in one rename.

    No data/ therefore means: nothing was ever committed here, and whatever stands there may be made again.
    """
    root.chmod(0o700)
    try:
        store_file = layout.read_store_file(root)
    except StoreNotFoundError:
        store_file = layout.write_store_file(root)
    building = root / f"{layout.TEMPORARY}data"
    shutil.rmtree(building, ignore_errors=True)
    layout.make_folder(building)
    layout.make_folder(building / "gen-1")
    _fill(building / "gen-1", store_file)
    for folder in (building / "gen-1", building):
        layout.sync_folder(folder)
    layout.point_to(root, root / layout.DATA_FOLDER / "gen-1")
    building.rename(root / layout.DATA_FOLDER)
    layout.sync_folder(root)


def _fill(generation: Path, store_file: layout.StoreFile) -> None:
    if not layout.allocate_lock_file(generation, LOCK_FILE_BYTES):
        raise NoSpaceError(f"no space to make a store at {generation}", "free some disk space")
    environment = open_lmdb(generation, read_only=False, create=True)
    try:
        with environment.begin(write=True) as transaction:
            data = dump_json({"uuid": store_file.uuid, "format": store_file.format})
            transaction.put(tables.META + keys.STORE_KEY, seal(keys.STORE_KEY, Kind.STORE, data))
    except lmdb.Error as error:
        raise NoSpaceError(f"cannot make a store at {generation}: {error}", "is the disk full?") from error
    finally:
        environment.close()
    for name in ("data.mdb", "lock.mdb"):
        (generation / name).chmod(0o600)
