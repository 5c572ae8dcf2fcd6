"""Snapshots of a store: what one read transaction sees."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, Self, TypeAlias, TypeVar

import lmdb

from kvtool.core.cache.layout import REPAIR
from kvtool.core.cache.pages import META_PAGES, Value
from kvtool.core.cache.record import Allocator, Kind, unseal
from kvtool.core.cache.tree import Tree, damaged_pages
from kvtool.core.errors import DamagedError

P = ParamSpec("P")
T = TypeVar("T")
Transaction: TypeAlias = "lmdb.Transaction[memoryview]"


class Snapshot:
    """A read transaction that threads share. It ends when its last user leaves: a loader may still read. As a context,
    it leaves at the end; an interrupt just before leaves the environment open, but no thread waits for that. Values are
    private copies."""

    def __init__(self, tree: Tree, end: Callable[[], None]) -> None:
        self._tree = tree
        self._end = end
        self._users = 1
        self._lock = threading.Lock()

    def enter(self) -> bool:
        """Use the transaction until :meth:`leave`; False: it has ended."""
        with self._lock:
            self._users += bool(self._users)
            return self._users > 0

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def get(self, table: bytes, key: bytes, most: int | None = None) -> memoryview | None:
        """Copy a value, or only its first `most` bytes, of which no digest is checked; None: no such key."""
        return self._tree.get(table + key, most)

    def payload(self, table: bytes, key: bytes, kind: Kind, what: str) -> memoryview | None:
        """Return the contents of a value's envelope, or None. Raises DamagedError, which names the value by `what`."""
        data = self.get(table, key)
        return None if data is None else checked_payload(key, kind, data, what)

    def ending(self, table: bytes, key: bytes, size: int) -> bytes | None:
        """Return the last bytes of a value, or None; reads no others."""
        return self._tree.last(table + key, size)

    def copies(
        self, table: bytes, keys: Sequence[bytes], before: Callable[[int], None], allocate: Allocator
    ) -> Iterator[memoryview | DamagedError | None]:
        """Yield copies of many values: each is looked up once, and read ahead while others are copied if it is not in
        memory. `before` is called with the number of each before it is copied."""
        entries = [value_or_damage(self._tree.find, table + key) for key in keys]
        later = iter([entry for entry in entries if isinstance(entry, Value)])

        def read_ahead() -> None:
            for entry in later:  # once: then the kernel reads all of them already
                with contextlib.suppress(DamagedError):
                    self._tree.will_need(entry)

        for number, entry in enumerate(entries):
            if isinstance(entry, Value):
                next(later, None)
                before(number)
                yield value_or_damage(self._tree.value, entry, allocate=allocate, waits=read_ahead)
            else:
                yield entry

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
        list(self._tree.free_pages(full=False))  # which only checks them
        for table, key in rows:
            self._tree.touch(table + key)

    def damaged_pages(self) -> Iterator[str]:
        return damaged_pages(self._tree)

    def live_bytes(self) -> int:
        """Bytes of the pages in use, LMDB's two meta pages included; free pages do not count."""
        count = self._tree.meta.counts[1]
        return (META_PAGES + count.branches + count.leaves + count.beside) * self._tree.meta.page_size


def value_or_damage(read: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | DamagedError:
    try:
        return read(*args, **options)
    except DamagedError as error:
        return error


def checked_payload(key: bytes, kind: Kind, data: memoryview, what: str) -> memoryview:
    with damage_of(what):
        return unseal(key, kind, data)


@contextlib.contextmanager
def damage_of(what: str, hint: str = REPAIR) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"{what} of the store is damaged: {error.message}", hint) from error
