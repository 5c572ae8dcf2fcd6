"""LMDB environment, with what LMDB leaves to its caller: growth, forks, damage, sharing inside a process.

Default flags are crash-safe (kvtool/docs/store-format.md). Every value is copied: no buffer outlives its transaction.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import lmdb

from kvtool.core.cache import layout, space
from kvtool.core.cache.gate import Gate, Transaction, Visit
from kvtool.core.cache.lmdb_map import LOCK_FILE_BYTES, MAX_READERS, map_limit, open_lmdb
from kvtool.core.cache.snapshot import Snapshot
from kvtool.core.cache.tree import DataFile
from kvtool.core.cache.tree_check import check_data_file
from kvtool.core.errors import DamagedError, KvtoolError, NoSpaceError

T = TypeVar("T")

PAGE_BYTES = 4096
_BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system's own are
_PAD_SECONDS = 0.02


class Closed(KvtoolError):
    """The environment was closed: by its store, or because a compaction made another one current."""


class FileFullError(Exception):
    """A commit would make the data file longer than it may be; the store is as it was before."""


class Environment:
    """A generation's LMDB. Get one with :func:`acquire`, give it back with :func:`release`."""

    def __init__(self, generation: Path, read_only: bool) -> None:
        self.generation = generation
        self.read_only = read_only
        self.users = 0
        self._pid = os.getpid()
        self._gate = Gate()
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
        """A file cut under us would be a SIGBUS. Usually two numbers to compare."""
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
        """Close once all transactions have ended; a forked child leaves its parent's environment alone."""
        if self._pid != os.getpid():
            return
        self._gate.alone(self._shut)

    def _shut(self) -> None:
        if not self._closed:
            self._closed = True
            self._file.close()
            self._env.close()

    def reopen(self) -> None:
        """Forget an environment that LMDB has given up on (after a failed meta page write)."""

        def again() -> None:
            self._file.close()
            self._env.close()
            self._open()

        self._gate.alone(again)

    def _enter(self, visit: Visit) -> None:
        self.check_usable()  # a forked child must not wait at its parent's gate
        self._gate.enter(visit)
        self.check_usable()  # closed while we waited

    # ---- reading -------------------------------------------------------------------------------------------------

    def begin(self, visit: Visit) -> None:
        """Start the visit's read transaction. Its owner ends the visit, soon, whether this raises or not."""
        for attempt in range(8):
            try:
                self._enter(visit)
                self._check_length()
                visit.transaction = self._env.begin(buffers=True)
                visit.tree = self._file.tree(visit.transaction.id(), self._page_size)
                if visit.tree is not None:
                    return
                visit.end()
            except lmdb.Error as error:
                visit.end()
                if not self._recover(error) or attempt == 7:
                    raise self.read_failure(error) from error
        raise DamagedError(f"{self.generation}: the meta page of the store is damaged", "run `kvtool store verify`")

    def snapshot(self, visit: Visit) -> Snapshot:
        """The reading side of a transaction that was begun."""
        assert visit.tree is not None
        return Snapshot(visit.tree)

    @contextlib.contextmanager
    def read(self) -> Iterator[Snapshot]:
        """A short read transaction."""
        visit = Visit()
        try:
            self.begin(visit)
            yield self.snapshot(visit)
        except lmdb.Error as error:
            raise self.read_failure(error) from error
        finally:
            visit.end()

    def _recover(self, error: lmdb.Error) -> bool:
        """Mend the cause of an error, if possible. Returns True if the call is worth another try."""
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
        """Run `apply` in one write transaction, durable on return; again from its start after the map has grown.

        Parameters
        ----------
        apply : puts and deletes; computes nothing and keeps no state, for it may run more than once.
        need : about how many bytes it writes.

        Raises
        ------
        NoSpaceError : disk, quota or map limit; the store is as it was before.
        """
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
                self._reset_after(error)
                raise reason from error

    @contextlib.contextmanager
    def limited(self, most: int) -> Iterator[None]:
        """Let no write make the data file longer than this many bytes: LMDB itself takes no page beyond its map.

        How many of the free pages a commit finds is known to LMDB alone, and only while it writes: a value of several
        pages needs neighbours, and pages that were freed last are not free yet. A write that does not fit raises
        FileFullError.
        """
        before = int(self._env.info()["map_size"])
        self._resize(max(most, self.allocated_bytes()) // PAGE_BYTES * PAGE_BYTES)
        self._most = most
        try:
            yield
        finally:
            self._most = None
            self._resize(before)

    def _write_once(self, apply: Callable[[Transaction], T]) -> T:
        visit = Visit()
        try:
            self._enter(visit)
            with self._env.begin(write=True, buffers=True) as transaction:
                result = apply(transaction)
            self.pad()
            return result
        finally:
            visit.end()

    def _reset_after(self, error: lmdb.Error) -> None:
        """A write that failed at the meta page makes LMDB refuse everything until the environment is opened anew."""
        del error
        try:
            with self.read():
                pass
        except KvtoolError:
            self.reopen()

    def _grow(self) -> None:
        size, limit = self._env.info()["map_size"], map_limit()
        if size >= limit:
            raise NoSpaceError(
                f"{self.generation}: the map limit of {space.megabytes(limit)} is reached",
                "make room with `kvtool store prune`, or raise KVTOOL_MAP_LIMIT",
            )
        self._resize(min(2 * size, limit))

    def _resize(self, size: int) -> None:
        self._gate.alone(lambda: self._set_size(size))

    def _set_size(self, size: int) -> None:
        try:
            self._env.set_mapsize(size)
        except lmdb.Error as error:
            raise NoSpaceError(
                f"{self.generation}: no address space for the store: {error}", "raise ulimit -v"
            ) from error

    def is_at(self, generation: Path) -> bool:
        """Return True if the data file in this folder is the open one, or cannot be seen."""
        try:
            status = (generation / "data.mdb").stat()
        except OSError:
            return True
        return self._file.is_file(status)

    # ---- facts ---------------------------------------------------------------------------------------------------

    def file_bytes(self) -> int:
        """Length of the data file."""
        return (self.generation / "data.mdb").stat().st_size

    def allocated_bytes(self) -> int:
        """Return the bytes of all pages that were ever in use."""
        return (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]

    def free_bytes(self) -> int:
        """Return the bytes of the data file that the next commits can use without more of the disk."""
        with self.read() as snapshot:
            return self.free_beside(snapshot.live_bytes())

    def free_beside(self, live: int) -> int:
        """The same where the pages in use are known to have `live` bytes: free pages, and the tail behind the last one.

        A commit that met a full disk leaves such a tail. Holes in a file take from what counts of it.
        """
        allocated, status = self.allocated_bytes(), (self.generation / "data.mdb").stat()
        written = min(status.st_size, status.st_blocks * _BLOCK_BYTES)
        return max(0, allocated - live) + max(0, written - allocated)

    def copy_to(self, folder: Path) -> None:
        """A compact copy of a consistent state, into an existing empty folder."""
        visit = Visit()
        try:
            self._enter(visit)
            self._env.copy(os.fspath(folder), compact=True)
        except lmdb.Error as error:
            raise space.explain(error, self.generation, self.file_bytes()) from error
        finally:
            visit.end()


# LMDB must not be opened twice in a process: closing one copy drops the other's POSIX locks. So it is shared.
_open_environments: dict[tuple[int, int], Environment] = {}
_registry = threading.Lock()


def acquire(generation: Path, read_only: bool) -> Environment:
    """The process's environment of this folder, opened on need."""
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
    """Give it back; the last user closes it."""
    with _registry:
        environment.users -= 1
        if environment.users <= 0:
            for key in [key for key, value in _open_environments.items() if value is environment]:
                del _open_environments[key]
            environment.close()
