"""LMDB environment of a store, and a store's connection to it: a snapshot for each read, or one view for many. LMDB's
default flags are crash-safe (`kvtool help store-format`). Every value is copied: no buffer outlives its transaction.

The map has one size from the start, 16 TiB of addresses where the system grants them: no transaction has to end for the
file to grow."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import lmdb

from kvtool.core.cache import layout, tables
from kvtool.core.cache.entries import load_json
from kvtool.core.cache.record import Kind, unseal
from kvtool.core.cache.tree import DataFile, Snapshot, Transaction, check_data_file, damage_of
from kvtool.core.errors import DamagedError, KvtoolError, NoSpaceError, StoreFormatError

T = TypeVar("T")
FileKey = tuple[int, int]  # device and inode

PAGE_BYTES = 4096
MAX_READERS = 1024  # killed readers keep their slots until the next reader_check
LOCK_FILE_BYTES = 128 * MAX_READERS
_MAP_BYTES, _MAP_LEAST = 2**44, 2**24  # addresses only: no memory, and no disk
_BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system's own are
_PAD_SECONDS = 0.02
_ATTEMPTS = 8


class Closed(KvtoolError): ...


class Environment:
    """A generation's LMDB, closed by the last of its stores and transactions. Get one with :func:`acquire`."""

    def __init__(self, generation: Path, read_only: bool, key: FileKey) -> None:
        self.generation = generation
        self.read_only = read_only
        self._key = key
        self._stores = self._transactions = 0
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closed = True
        self._open()

    # ---- opening -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        check_data_file(self.generation)
        can_lock = not self.read_only and layout.allocate_lock_file(self.generation, LOCK_FILE_BYTES)
        self.read_only = not can_lock
        self._env = open_lmdb(self.generation, read_only=self.read_only)
        try:
            if can_lock:
                self._env.reader_check()
            self._file = DataFile(self.generation / "data.mdb")
            self._page_size = int(self._env.stat()["psize"])
            self._sound_length = 0
            self._check_length()
        except BaseException:
            self._env.close()
            raise
        self._closed = False

    def _check_length(self) -> None:
        """Refuse a truncated file, which would be a SIGBUS. Usually compares two numbers."""
        needed = self.allocated_bytes()
        if self._file.size() >= needed or needed == self._sound_length:
            return
        time.sleep(_PAD_SECONDS)  # a writer may be between its commit and its pad
        if self._file.size() < needed:
            check_data_file(self.generation)
            self._sound_length = needed

    def pad(self) -> None:
        """Make the file as long as its last page says; writer lock held. LMDB may leave given-up pages unwritten."""
        needed = self.allocated_bytes()
        if self._file.size() < needed:
            with contextlib.suppress(OSError):
                os.truncate(self.generation / "data.mdb", needed)

    # ---- users ---------------------------------------------------------------------------------------------------

    def attach(self) -> bool:
        """Count a store. False: the environment is closed."""
        self._check_process()
        with self._lock:
            self._stores += not self._closed
            return not self._closed

    def detach(self) -> None:
        self.leave(stores=1, transactions=0)

    def enter(self) -> None:
        """Keep the environment open for a transaction, until :meth:`leave`. Raises Closed."""
        self._check_process()
        with self._lock:
            if self._closed:
                raise Closed("the store is closed")
            self._transactions += 1

    def leave(self, stores: int = 0, transactions: int = 1) -> None:
        if self._pid != os.getpid():  # a forked child does not touch its parent's environment, nor wait for its lock
            return
        with self._lock:
            self._stores -= stores
            self._transactions -= transactions
            if not (self._stores or self._transactions or self._closed):
                self._close()
                del _open_environments[self._key]  # no thread replaces the entry before this lock is free

    def _close(self) -> None:
        self._closed = True
        self._file.close()
        self._env.close()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise KvtoolError(
                "a store cannot be used across fork", "open it again in the new process, started by spawn"
            )

    # ---- reading -------------------------------------------------------------------------------------------------

    def read(self) -> Snapshot:
        """Begin a read transaction: ``with environment.read() as snapshot``. Raises Closed, DamagedError, KvtoolError:
        there are too many readers, or no address space."""
        for attempt in range(_ATTEMPTS):
            try:
                if (snapshot := self._begin()) is not None:
                    return snapshot
            except lmdb.Error as error:
                if attempt == _ATTEMPTS - 1 or not self._recover(error):
                    raise self._read_failure(error) from error
        raise DamagedError(f"{self.generation}: the meta page of the store is damaged", "run `kvtool store verify`")

    def _begin(self) -> Snapshot | None:
        """Begin a read transaction; None: its meta page was just overwritten."""
        self.enter()
        transaction = None
        try:
            self._check_length()
            transaction = self._env.begin(buffers=True)
            tree = self._file.tree(transaction.id(), self._page_size)
            if tree is not None:
                return Snapshot(tree, partial(self._end, transaction))
        except BaseException:
            self._end(transaction)
            raise
        self._end(transaction)
        return None

    def _end(self, transaction: Transaction | None) -> None:
        if transaction is not None:
            transaction.abort()
        self.leave()

    def _recover(self, error: lmdb.Error) -> bool:
        """Mend the cause of an error, if possible. True: the call is worth another try."""
        if isinstance(error, lmdb.ReadersFullError):
            return self._env.reader_check() > 0
        if not isinstance(error, (lmdb.PanicError, lmdb.MapResizedError)):
            return False
        with self._lock:  # a commit failed at the meta page, or another process wrote more than our small map shows
            is_idle = not self._transactions and not self._closed
            if is_idle:
                self._close()
                self._open()
        if not is_idle:
            time.sleep(_PAD_SECONDS)
        return True

    def _read_failure(self, error: lmdb.Error) -> KvtoolError:
        if isinstance(error, lmdb.ReadersFullError):
            return KvtoolError(f"{self.generation}: {MAX_READERS} readers at once are too many", "end some of them")
        if isinstance(error, lmdb.MapResizedError):
            return _no_addresses(self.generation)
        message = f"{self.generation}: the index of the store is damaged ({error})"
        return DamagedError(message, "run `kvtool store verify`")

    # ---- writing -------------------------------------------------------------------------------------------------

    def write(self, apply: Callable[[Transaction], T], need: int) -> T:
        """Run `apply`, puts and deletes, in one write transaction, durable on return. `need`: about how many bytes it
        writes. Raises NoSpaceError (disk, quota or map limit): the store is unchanged."""
        for attempt in range(_ATTEMPTS):
            try:
                return self._write(apply)
            except lmdb.MapFullError as error:
                raise NoSpaceError(
                    f"{self.generation}: the map limit of {layout.megabytes(self._env.info()['map_size'])} is reached",
                    "make room with `kvtool store prune`, or raise KVTOOL_MAP_LIMIT and `ulimit -v`",
                ) from error
            except lmdb.Error as error:
                if attempt == _ATTEMPTS - 1 or not self._recover(error):
                    raise layout.explain(error, self.generation, need) from error
        raise AssertionError("unreachable")

    def _write(self, apply: Callable[[Transaction], T]) -> T:
        self.enter()
        try:
            with self._env.begin(write=True, buffers=True) as transaction:
                result = apply(transaction)
            self.pad()
            return result
        finally:
            self.leave()

    def is_at(self, generation: Path) -> bool:
        """True if the data file in this folder is the open one, or cannot be seen."""
        try:
            status = (generation / "data.mdb").stat()
        except OSError:
            return True
        return self._file.is_file(status)

    # ---- facts ---------------------------------------------------------------------------------------------------

    def file_bytes(self) -> int:
        return (self.generation / "data.mdb").stat().st_size

    def allocated_bytes(self) -> int:
        return (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]

    def free_bytes(self) -> int:
        """Bytes of the data file that the next commits can use without more of the disk."""
        with self.read() as snapshot:
            return self.free_beside(snapshot.live_bytes())

    def free_beside(self, live: int) -> int:
        """Return `free_bytes` if the pages in use have `live` bytes: free pages, and the tail that a commit on a full
        disk leaves after the last one. Holes in the file do not count."""
        allocated, status = self.allocated_bytes(), (self.generation / "data.mdb").stat()
        written = min(status.st_size, status.st_blocks * _BLOCK_BYTES)
        return max(0, allocated - live) + max(0, written - allocated)

    def copy_to(self, folder: Path) -> None:
        self.enter()
        try:
            self._env.copy(os.fspath(folder), compact=True)
        except lmdb.Error as error:
            raise layout.explain(error, self.generation, self.file_bytes()) from error
        finally:
            self.leave()


# LMDB must not be opened twice in a process: closing one copy drops the other's POSIX locks. So it is shared.
_open_environments: dict[FileKey, Environment] = {}
_registry = threading.Lock()


def acquire(generation: Path, read_only: bool) -> Environment:
    """Open a generation, or share its open environment, until :meth:`Environment.detach`."""
    check_data_file(generation)
    status = (generation / "data.mdb").stat()
    key = (status.st_dev, status.st_ino)
    with _registry:
        environment = _open_environments.get(key)
        if environment is None or not environment.attach():
            environment = _open_environments[key] = Environment(generation, read_only, key)
            environment.attach()
        return environment


def map_limit() -> int:
    """Bytes of a map; a process that opens many stores gives each later one less, lest its addresses run out."""
    text = os.environ.get("KVTOOL_MAP_LIMIT", "")
    if text.isdecimal():
        return max(int(text), 2**16)
    return _MAP_BYTES // (1 + len(_open_environments)) // PAGE_BYTES * PAGE_BYTES


def _no_addresses(generation: Path) -> NoSpaceError:
    return NoSpaceError(f"{generation}: no address space for the store", "raise `ulimit -v`")


def open_lmdb(generation: Path, *, read_only: bool, create: bool = False) -> lmdb.Environment:
    """Open an LMDB with the largest map that the system grants, up to the limit."""
    size = map_limit()
    while True:
        try:
            return lmdb.open(
                os.fspath(generation),
                map_size=size,
                max_readers=MAX_READERS,
                mode=0o600,
                readonly=read_only,
                lock=not read_only,
                create=create,
                lib_version=0,
            )
        except (lmdb.MemoryError, MemoryError) as error:
            if size <= _MAP_LEAST:
                raise _no_addresses(generation) from error
            size //= 4
        except (lmdb.InvalidError, lmdb.VersionMismatchError) as error:
            raise StoreFormatError(f"{generation} holds an LMDB that is not kvtool's", layout.REBUILD) from error
        except lmdb.Error as error:
            raise KvtoolError(
                f"{generation}: the store cannot be opened: {error}", "check who owns the folder"
            ) from error


class StoreConnection:
    """Base of :class:`kvtool.core.cache.store.Store`: knows where the data is, not what is in it."""

    def __init__(self, path: Path, uuid: str) -> None:
        self.path = path
        self.uuid = uuid
        self._mutex = threading.Lock()
        self._viewing = threading.RLock()
        self._view: Snapshot | None = None
        self._environment: Environment | None = None
        self._attach()

    def _attach(self) -> None:
        for attempt in range(3):
            generation = layout.current_generation(self.path)
            if generation is None:
                raise DamagedError(f"the store at {self.path} has no data", "ingest again to rebuild it")
            try:
                places = (self.path, generation, generation / "data.mdb")
                environment = acquire(generation, not all(os.access(path, os.W_OK) for path in places))
                break
            except (DamagedError, FileNotFoundError):
                if attempt == 2 or layout.current_generation(self.path) == generation:
                    raise
        try:
            self._check_identity(environment)
        except BaseException:
            environment.detach()
            raise
        self._environment = environment

    def _check_identity(self, environment: Environment) -> None:
        with environment.read() as snapshot:
            data = snapshot.get(tables.META, tables.STORE_KEY)
        if data is None:
            raise StoreFormatError(f"{self.path} holds an LMDB that is not kvtool's", layout.REBUILD)
        with damage_of("the name", layout.REBUILD):
            inside = load_json(unseal(tables.STORE_KEY, Kind.STORE, data))
        if inside.get("uuid") != self.uuid:
            raise StoreFormatError(f"the data in {self.path} belongs to another store", layout.REBUILD)
        layout.check_format(self.path, inside.get("format"))

    def _release(self) -> None:
        with self._mutex:
            environment, self._environment = self._environment, None
        if environment is not None:
            environment.detach()

    def follow(self) -> None:
        """Move on to the generation that a compaction made current; a view stays where it is."""
        if self._view is not None:
            return
        generation = layout.current_generation(self.path)
        with self._mutex:
            old = self._environment
            if old is None or generation is None or old.generation == generation:
                if old is not None and generation is not None and not old.is_at(generation):
                    raise StoreFormatError(f"{self.path} holds another store now", "open it again")
                return
            self._attach()
        old.detach()

    @property
    def environment(self) -> Environment:
        environment = self._environment
        if environment is None:
            raise Closed("the store is closed")
        return environment

    @property
    def read_only(self) -> bool:
        """True if the store cannot be written: then reads take no locks and leave no notes."""
        return self.environment.read_only

    # ---- reading -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def view(self) -> Iterator[None]:
        """Hold one state of the store for all reads through this object, by any thread; nested views are one.

        A view keeps pages that a writer has replaced: hold it no longer than a question. Nothing can be written through
        this object meanwhile.
        """
        with self._viewing:
            if self._view is not None:
                yield
                return
            self.follow()
            view = None
            try:
                view = self._view = self._begin()
                yield
            finally:
                if self._view is view:
                    self.end_view()

    def end_view(self) -> None:
        with self._viewing:
            view, self._view = self._view, None
            if view is not None:
                view.leave()

    @contextlib.contextmanager
    def unviewed(self) -> Iterator[None]:
        """Keep views out while a writer reads what it has just written. Raises KvtoolError if this thread holds one."""
        with self._viewing:
            if self._view is not None:
                raise KvtoolError("nothing can be written through a store while a view of it is held", "end it first")
            yield

    def snapshot(self) -> Snapshot:
        """Hold one consistent state of the store for a short read: the view's, if there is a view."""
        view = self._view
        return view if view is not None and view.enter() else self._begin()

    def _begin(self) -> Snapshot:
        """Begin in the current environment; in the next one if a switch of generation closes this one meanwhile."""
        while True:
            environment = self.environment
            try:
                return environment.read()
            except Closed:
                if self._environment is environment:
                    raise
