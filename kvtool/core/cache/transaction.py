"""Read transactions: snapshots of a store, and the lock that lets many of them run, or one change of LMDB's map.

LMDB moves the map under running transactions, so no transaction may be open while its size is changed.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import lmdb

from kvtool.core.cache.layout import REPAIR
from kvtool.core.cache.pages import META_PAGES
from kvtool.core.cache.record import Allocator, Kind, aligned, unseal
from kvtool.core.cache.tree import Found, Tree, damaged_pages
from kvtool.core.errors import DamagedError

Transaction: TypeAlias = "lmdb.Transaction[memoryview]"
_LOOK_SECONDS = 0.001


class TransactionGuard:
    """Guard of a transaction in an environment: created first, ended in a `finally`; ending it twice is allowed. Its
    state is one attribute, so that ending is a single assignment, which no signal can interrupt halfway."""

    __slots__ = ("__weakref__", "inside", "lock", "thread", "transaction")

    def __init__(self) -> None:
        self.lock: ReadWriteLock | None = None
        self.inside = False
        self.thread = 0
        self.transaction: Transaction | None = None

    def end(self) -> None:
        try:
            if self.transaction is not None:
                self.transaction.abort()
        finally:
            self.inside = False
            self.transaction = None
            if self.lock is not None:
                self.lock.left(self)


class ReadWriteLock:
    """A lock that is shared by many guards, or held exclusively by one thread.

    A waiting exclusive thread keeps new threads out, but a thread inside may enter again. The lock refers to its guards
    weakly, and a thread that asks for exclusive use ends its own: an interrupt may have left one open. Waiting polls:
    an interrupt cannot leave a plain lock held, unlike a condition.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._guards: dict[int, weakref.ref[TransactionGuard]] = {}
        self._waiting: set[object] = set()

    def enter(self, guard: TransactionGuard) -> None:
        guard.lock, guard.thread = self, threading.get_ident()
        while True:
            with self._lock:
                if not self._waiting or any(other.thread == guard.thread for other in self._inside()):
                    self._guards[id(guard)] = weakref.ref(guard)
                    guard.inside = True
                    return
            time.sleep(_LOOK_SECONDS)

    def left(self, guard: TransactionGuard) -> None:
        self._guards.pop(id(guard), None)

    def run_alone(self, work: Callable[[], None]) -> None:
        ticket = object()
        try:
            self._waiting.add(ticket)
            while True:
                with self._lock:
                    if not self._others():
                        work()
                        return
                time.sleep(_LOOK_SECONDS)
        finally:
            self._waiting.discard(ticket)

    def _inside(self) -> list[TransactionGuard]:
        known = [reference() for reference in list(self._guards.values())]
        return [guard for guard in known if guard is not None and guard.inside]

    def _others(self) -> bool:
        this_thread = threading.get_ident()
        for guard in self._inside():
            if guard.thread == this_thread:
                guard.end()
        return bool(self._inside())


class Snapshot:
    """A read transaction, which threads may share. Values are private copies."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def get(self, table: bytes, key: bytes, allocate: Allocator = aligned) -> memoryview | None:
        """Copy a value, or None; a large one is copied into what `allocate` returns."""
        return self._tree.get(table + key, allocate=allocate)

    def payload(self, table: bytes, key: bytes, kind: Kind, what: str) -> memoryview | None:
        """Return the contents of a value's envelope, or None. Raises DamagedError, which names the value by `what`."""
        data = self.get(table, key)
        return None if data is None else checked_payload(key, kind, data, what)

    def beginning(self, table: bytes, key: bytes, size: int) -> memoryview | None:
        """Copy a value's first bytes, or None; the rest of it is not read, and its digest not checked."""
        return self._tree.get(table + key, size)

    def ending(self, table: bytes, key: bytes, size: int) -> bytes | None:
        """Return the last bytes of a value, or None; reads no others."""
        return self._tree.last(table + key, size)

    def copies(
        self, table: bytes, keys: Sequence[bytes], before: Callable[[int], None], allocate: Allocator
    ) -> Iterator[memoryview | DamagedError | None]:
        """Yield copies of many values: each is looked up once, and read ahead while others are copied if it is not in
        memory. `before` is called with the number of each before it is copied."""
        found = [self._found(table + key) for key in keys]
        waited: list[int] = []

        def copied(number: int) -> memoryview | DamagedError | None:
            def waits() -> None:
                if not waited:  # from here on the kernel reads all the others, too
                    self._will_need(found[number + 1 :])
                waited.append(number)

            place = found[number]
            if place is None or isinstance(place, DamagedError):
                return place
            before(number)
            try:
                return self._tree.value(place, allocate, waits)
            except DamagedError as error:
                return error

        return map(copied, range(len(keys)))

    def _found(self, key: bytes) -> Found | DamagedError | None:
        try:
            return self._tree.find(key)
        except DamagedError as error:
            return error

    def _will_need(self, found: Sequence[Found | DamagedError | None]) -> None:
        for place in found:
            if isinstance(place, tuple):
                with contextlib.suppress(DamagedError):
                    self._tree.will_need(place)

    def has(self, table: bytes, key: bytes) -> bool:
        return self._tree.find(table + key) is not None

    def keys(self, table: bytes, prefix: bytes = b"") -> Iterator[bytes]:
        for key, _ in self._tree.items(table + prefix):
            yield key[len(table) :]

    def items(self, table: bytes, prefix: bytes = b"") -> Iterator[tuple[bytes, memoryview]]:
        for key, value in self._tree.values(table + prefix):
            yield key[len(table) :], value

    def sizes(self, table: bytes, prefix: bytes = b"") -> Iterator[tuple[bytes, int]]:
        for key, size in self._tree.items(table + prefix):
            yield key[len(table) :], size

    def touch(self, rows: list[tuple[bytes, bytes]]) -> None:
        """Check the pages that LMDB will read when these (table, key) are put or deleted; raises DamagedError."""
        self._tree.check_free_list()
        for table, key in rows:
            self._tree.touch(table + key)

    def damaged_pages(self) -> Iterator[str]:
        return damaged_pages(self._tree)

    def live_bytes(self) -> int:
        """Bytes of the pages in use, LMDB's two meta pages included; free pages do not count."""
        count = self._tree.meta.counts[1]
        return (META_PAGES + count.branches + count.leaves + count.beside) * self._tree.meta.page_size


def checked_payload(key: bytes, kind: Kind, data: memoryview, what: str) -> memoryview:
    with damage_of(what):
        return unseal(key, kind, data)


@contextlib.contextmanager
def damage_of(what: str, hint: str = REPAIR) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"{what} of the store is damaged: {error.message}", hint) from error
