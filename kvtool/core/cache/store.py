from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import lmdb

from kvtool.core.cache import layout, tables
from kvtool.core.cache.collect import remove_leftovers
from kvtool.core.cache.entries import dump_json
from kvtool.core.cache.environment import LOCK_FILE_BYTES, open_lmdb
from kvtool.core.cache.layout import writer_lock
from kvtool.core.cache.reader import StoreReader
from kvtool.core.cache.record import Kind, seal
from kvtool.core.cache.writer import Writer
from kvtool.core.common.files import cache_dir
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.errors import KvtoolError, NoSpaceError, StoreFormatError, StoreNotFoundError, UsageError

_CREATE_WAIT = 10.0  # seconds for two processes that make the same store


class Store(StoreReader):
    """A folder of KV records, documents and chunks. A :class:`Writer` of it belongs to one thread."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a store, which may be read-only. Raises StoreNotFoundError, StoreFormatError, DamagedError."""
        root = Path(os.path.abspath(path))
        return cls(root, layout.read_uuid(root))

    @classmethod
    def create_or_open(cls, path: Path) -> Self:
        """Open a store; make it if it does not exist. Raises StoreFormatError: `path` holds other things."""
        root = Path(os.path.abspath(path))
        create_if_missing(root)
        return cls.open(root)

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self.flush()
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def writer(self, wait: float = 0.0, max_size: int | None = None, say: Warn = warn_nobody) -> Iterator[Writer]:
        """Hold the one writer of the store; for `wait` and `say` see :func:`writer_lock`. Leaving normally commits what
        is buffered; leaving by an error drops it. `max_size`: bytes that the store's folder may hold; None: the store's
        own budget. Raises StoreLockedError; KvtoolError: the store is read-only, or this thread holds a view of it."""
        if self.read_only:
            raise KvtoolError(f"the store at {self.path} is read-only", "copy it to a writable place")
        with self.unviewed(), writer_lock(self.path, wait, say):
            self.follow()
            remove_leftovers(self.path)
            self.environment.pad()
            writer = Writer(self, max_size)
            try:
                yield writer
                writer.flush()
                if self.use_log.is_long:
                    writer.fold_access()
            finally:
                writer.end()


@contextlib.contextmanager
def making(path: Path, wait: float, say: Warn) -> Iterator[None]:
    """Let one process of this user at a time make the store at `path`, before there is a folder for a lock."""
    root = os.path.realpath(path)
    try:
        folder = cache_dir() / "making" / hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
        layout.make_folder(folder)
    except (OSError, UsageError):  # a user without a home: two that make one store may choose different models
        yield
        return
    with writer_lock(folder, wait, say, f"{root} is being made by"):
        yield


def create_if_missing(root: Path) -> None:
    if _is_whole(root):
        return
    if root.exists() and not root.is_dir():
        raise StoreFormatError(f"{root} is a file, not a store's folder", "name a folder with --store")
    if any("\ud800" <= character <= "\udfff" for character in str(root)):  # LMDB's binding takes no other names
        raise UsageError(f"{str(root)!a} cannot be a store: its name is not UTF-8", "name another folder with --store")
    try:
        layout.make_folder(root)
        if layout.is_foreign(root):
            raise StoreFormatError(f"{root} is not empty and holds no kvtool store", "name an empty or a new folder")
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
        layout.read_uuid(root)
    except StoreNotFoundError:
        return False
    return layout.current_generation(root) is not None and (root / layout.DATA_FOLDER).exists()


def _create(root: Path) -> None:
    """Write store.json, the first generation under another name, the pointer, and last data/ itself in one rename. No
    data/ therefore means: nothing was ever committed here, and what is there may be made again."""
    root.chmod(0o700)
    try:
        name = layout.read_uuid(root)
    except StoreNotFoundError:
        name = str(uuid.uuid4())
        text = json.dumps({"format": layout.FORMAT, "uuid": name})
        layout.atomic_write(root / layout.STORE_FILE, text.encode() + b"\n")
    building = root / f"{layout.TEMPORARY}data"
    shutil.rmtree(building, ignore_errors=True)
    layout.make_folder(building)
    layout.make_folder(building / "gen-1")
    _fill(building / "gen-1", name)
    for folder in (building / "gen-1", building):
        layout.sync_folder(folder)
    layout.point_to(root, root / layout.DATA_FOLDER / "gen-1")
    building.rename(root / layout.DATA_FOLDER)
    layout.sync_folder(root)


def _fill(generation: Path, name: str) -> None:
    if not layout.allocate_lock_file(generation, LOCK_FILE_BYTES):
        raise NoSpaceError(f"no space to make a store at {generation}", "free some disk space")
    environment = open_lmdb(generation, read_only=False, create=True)
    try:
        with environment.begin(write=True) as transaction:
            data = dump_json({"uuid": name, "format": layout.FORMAT})
            transaction.put(tables.META + tables.STORE_KEY, seal(tables.STORE_KEY, Kind.STORE, data))
    except lmdb.Error as error:
        raise NoSpaceError(f"cannot make a store at {generation}: {error}", "is the disk full?") from error
    finally:
        environment.close()
    for file in ("data.mdb", "lock.mdb"):
        (generation / file).chmod(0o600)
