"""LMDB environment of a store, and a store's connection to it: a snapshot for each read, or one view for many. LMDB's
default flags are crash-safe (`kvtool help store-format`). Every value is copied: no buffer outlives its transaction."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import lmdb

from kvtool.core.cache import layout, space, tables
from kvtool.core.cache.entries import load_json
from kvtool.core.cache.record import Kind, unseal
from kvtool.core.cache.transaction import ReadWriteLock, Snapshot, Transaction, TransactionGuard, damage_of
from kvtool.core.cache.tree import DataFile, check_data_file
from kvtool.core.errors import DamagedError, KvtoolError, NoSpaceError, StoreFormatError

T = TypeVar("T")

PAGE_BYTES = 4096
MAX_READERS = 1024  # killed readers keep their slots until the next reader_check
LOCK_FILE_BYTES = 128 * MAX_READERS
_MAP_START, _MAP_LIMIT, _MAP_LEAST = 2**40, 2**44, 2**24  # sparse: a 1 TiB map opens in 38 µs
_BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system's own are
_PAD_SECONDS = 0.02


class Closed(KvtoolError): ...


class FileFullError(Exception): ...


class Environment:
    """A generation's LMDB. Get one with :func:`acquire`, give it back with :func:`release`."""

    def __init__(self, generation: Path, read_only: bool) -> None:
        self.generation = generation
        self.read_only = read_only
        self.users = 0
        self._pid = os.getpid()
        self._lock = ReadWriteLock()
        self._closed = False
        self._most: int | None = None
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

    def close(self) -> None:
        """Close once all transactions have ended; a forked child does not touch its parent's environment."""
        if self._pid != os.getpid():
            return
        self._lock.run_alone(self._shut)

    def _shut(self) -> None:
        if not self._closed:
            self._closed = True
            self._file.close()
            self._env.close()

    def _reopen(self) -> None:
        self._file.close()
        self._env.close()
        self._open()

    def _enter(self, guard: TransactionGuard) -> None:
        self.check_usable()  # a forked child must not wait for its parent's lock
        self._lock.enter(guard)
        self.check_usable()  # closed while we waited

    # ---- reading -------------------------------------------------------------------------------------------------

    def begin(self, guard: TransactionGuard) -> Snapshot:
        for attempt in range(8):
            try:
                self._enter(guard)
                self._check_length()
                guard.transaction = self._env.begin(buffers=True)
                tree = self._file.tree(guard.transaction.id(), self._page_size)
                if tree is not None:
                    return Snapshot(tree)
                guard.end()
            except lmdb.Error as error:
                guard.end()
                if not self._recover(error) or attempt == 7:
                    raise self.read_failure(error) from error
        raise DamagedError(f"{self.generation}: the meta page of the store is damaged", "run `kvtool store verify`")

    @contextlib.contextmanager
    def read(self) -> Iterator[Snapshot]:
        guard = TransactionGuard()
        try:
            yield self.begin(guard)
        except lmdb.Error as error:
            raise self.read_failure(error) from error
        finally:
            guard.end()

    def _recover(self, error: lmdb.Error) -> bool:
        """Mend the cause of an error, if possible. True: the call is worth another try."""
        if isinstance(error, lmdb.MapResizedError):  # another process has let the file grow
            self._resize(0)
            return True
        if isinstance(error, lmdb.ReadersFullError):
            return self._env.reader_check() > 0
        return False

    def read_failure(self, error: lmdb.Error) -> KvtoolError:
        if isinstance(error, lmdb.ReadersFullError):
            return KvtoolError(f"{self.generation}: {MAX_READERS} readers at once are too many", "end some of them")
        message = f"{self.generation}: the index of the store is damaged ({error})"
        return DamagedError(message, "run `kvtool store verify`")

    def check_usable(self) -> None:
        if self._pid != os.getpid():
            raise KvtoolError(
                "a store cannot be used across fork", "open it again in the new process, started by spawn"
            )
        if self._closed:
            raise Closed("the store is closed")

    # ---- writing -------------------------------------------------------------------------------------------------

    def write(self, apply: Callable[[Transaction], T], need: int) -> T:
        """Run `apply`, puts and deletes, in one write transaction, durable on return; again from its start after the
        map has grown, so it keeps no state. `need`: about how many bytes it writes. Raises NoSpaceError (disk, quota or
        map limit): the store is unchanged."""
        while True:
            try:
                return self._write_once(apply)
            except lmdb.MapFullError as error:
                if self._most is not None:
                    raise FileFullError from error
                self._grow()
            except lmdb.MapResizedError:
                self._resize(0)
            except lmdb.Error as error:
                reason = space.explain(error, self.generation, need)
                self._reopen_if_stuck()
                raise reason from error

    @contextlib.contextmanager
    def limited(self, most: int) -> Iterator[None]:
        """Let no write make the data file longer than this many bytes: LMDB itself takes no page beyond its map. Only
        LMDB knows how many of the free pages a commit can use, and only while it writes. Raises FileFullError."""
        before = int(self._env.info()["map_size"])
        self._resize(max(most, self.allocated_bytes()) // PAGE_BYTES * PAGE_BYTES)
        self._most = most
        try:
            yield
        finally:
            self._most = None
            self._resize(before)

    def _write_once(self, apply: Callable[[Transaction], T]) -> T:
        guard = TransactionGuard()
        try:
            self._enter(guard)
            with self._env.begin(write=True, buffers=True) as transaction:
                result = apply(transaction)
            self.pad()
            return result
        finally:
            guard.end()

    def _reopen_if_stuck(self) -> None:
        """Reopen after a write that failed at the meta page: else LMDB would refuse everything."""
        try:
            with self.read():
                pass
        except KvtoolError:
            self._lock.run_alone(self._reopen)

    def _grow(self) -> None:
        size, limit = self._env.info()["map_size"], map_limit()
        if size >= limit:
            raise NoSpaceError(
                f"{self.generation}: the map limit of {space.megabytes(limit)} is reached",
                "make room with `kvtool store prune`, or raise KVTOOL_MAP_LIMIT",
            )
        self._resize(min(2 * size, limit))

    def _resize(self, size: int) -> None:
        self._lock.run_alone(lambda: self._set_size(size))

    def _set_size(self, size: int) -> None:
        try:
            self._env.set_mapsize(size)
        except lmdb.Error as error:
            raise NoSpaceError(
                f"{self.generation}: no address space for the store: {error}", "raise ulimit -v"
            ) from error

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
        guard = TransactionGuard()
        try:
            self._enter(guard)
            self._env.copy(os.fspath(folder), compact=True)
        except lmdb.Error as error:
            raise space.explain(error, self.generation, self.file_bytes()) from error
        finally:
            guard.end()


# LMDB must not be opened twice in a process: closing one copy drops the other's POSIX locks. So it is shared.
_open_environments: dict[tuple[int, int], Environment] = {}
_registry = threading.Lock()


def acquire(generation: Path, read_only: bool) -> Environment:
    check_data_file(generation)
    status = (generation / "data.mdb").stat()
    key = (status.st_dev, status.st_ino)
    with _registry:
        environment = _open_environments.get(key)
        if environment is None:
            environment = _open_environments[key] = Environment(generation, read_only)
        environment.check_usable()
        environment.users += 1
        return environment


def release(environment: Environment) -> None:
    with _registry:
        environment.users -= 1
        if environment.users <= 0:
            for key in [key for key, value in _open_environments.items() if value is environment]:
                del _open_environments[key]
            environment.close()


def map_limit() -> int:
    return _bytes_from_environment("KVTOOL_MAP_LIMIT", _MAP_LIMIT)


def _bytes_from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return max(int(text), 2**16) if text.isdecimal() else default


def open_lmdb(generation: Path, *, read_only: bool, create: bool = False) -> lmdb.Environment:
    size = min(_bytes_from_environment("KVTOOL_MAP_START", _MAP_START), map_limit())
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
                raise KvtoolError(f"{generation}: no address space for the store", "raise ulimit -v") from error
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
        self._view: View | None = None
        self._environment: Environment | None = None
        self._attach()

    def _attach(self) -> None:
        for attempt in range(3):
            generation = layout.current_generation(self.path)
            if generation is None:
                raise DamagedError(f"the store at {self.path} has no data", "ingest again to rebuild it")
            try:
                places = (self.path, generation, generation / "data.mdb")
                environment = acquire(generation, not all(os.access(place, os.W_OK) for place in places))
                break
            except (DamagedError, FileNotFoundError):
                if attempt == 2 or layout.current_generation(self.path) == generation:
                    raise
        try:
            self._check_identity(environment)
        except BaseException:
            release(environment)
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
            release(environment)

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
        release(old)

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
            guard, view = TransactionGuard(), None
            try:
                view = self._view = View(*self._begin(guard), guard)
                yield
            finally:
                if view is None:
                    guard.end()
                elif self._view is view:
                    self.end_view()

    def end_view(self) -> None:
        with self._viewing:
            view, self._view = self._view, None
            if view is not None:
                view.leave()

    @contextlib.contextmanager
    def unviewed(self) -> Iterator[None]:
        """Keep views out while a writer may change the map. Raises KvtoolError if this thread holds a view."""
        with self._viewing:
            if self._view is not None:
                raise KvtoolError("nothing can be written through a store while a view of it is held", "end it first")
            yield

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Hold one consistent state of the store for a short read: the view's, if there is a view."""
        view = self._view
        if view is not None and view.enter():
            try:
                yield view.snapshot
            except lmdb.Error as error:
                raise view.environment.read_failure(error) from error
            finally:
                view.leave()
            return
        guard = TransactionGuard()
        try:
            environment, snapshot = self._begin(guard)
            yield snapshot
        except lmdb.Error as error:
            raise environment.read_failure(error) from error
        finally:
            guard.end()

    def _begin(self, guard: TransactionGuard) -> tuple[Environment, Snapshot]:
        """Begin in the current environment; in the next one if a switch of generation closes this one meanwhile. Hold
        no lock here: a thread that waits for the environment's lock must not keep out those that are inside."""
        while True:
            environment = self.environment
            try:
                return environment, environment.begin(guard)
            except Closed:
                guard.end()
                if self._environment is environment:
                    raise


class View:
    """A read transaction that threads share. It ends when its last user leaves: a loader may still read."""

    def __init__(self, environment: Environment, snapshot: Snapshot, guard: TransactionGuard) -> None:
        self.environment, self.snapshot = environment, snapshot
        self._guard = guard
        self._users = 1
        self._lock = threading.Lock()

    def enter(self) -> bool:
        """Use the view until :meth:`leave`; False: it has ended."""
        with self._lock:
            if not self._users:
                return False
            if not self._guard.inside:
                raise KvtoolError("the store's view was lost while its map changed", "ask again")
            self._users += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._guard.end()
