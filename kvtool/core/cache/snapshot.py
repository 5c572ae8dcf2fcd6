"""Snapshot of a store: one consistent state, for a single read or a whole question, whatever is written meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from kvtool.core.cache.buffers import Room, aligned
from kvtool.core.cache.layout import REPAIR
from kvtool.core.cache.nodes import Leaf
from kvtool.core.cache.pages import META_PAGES
from kvtool.core.cache.record import Kind, unseal
from kvtool.core.cache.tree import BIG_HEADER_BYTES, Found, Tree
from kvtool.core.cache.tree_check import damaged_pages
from kvtool.core.errors import DamagedError


class Snapshot:
    """A read transaction, which threads may share. Values are private copies."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def get(self, table: bytes, key: bytes, room: Room = aligned) -> memoryview | None:
        """A copy of a value, or None; a large one stands where `room` says."""
        return self._tree.get(table + key, room=room)

    def payload(self, table: bytes, key: bytes, kind: Kind, what: str) -> memoryview | None:
        """Return the contents of a value's envelope, or None.

        Raises
        ------
        DamagedError : the value is damaged; the message names it by `what`.
        """
        data = self.get(table, key)
        return None if data is None else checked_payload(key, kind, data, what)

    def beginning(self, table: bytes, key: bytes, size: int) -> memoryview | None:
        """A copy of a value's first bytes, or None; the rest of it is not read, and its digest not checked."""
        return self._tree.get(table + key, size)

    def ending(self, table: bytes, key: bytes, size: int) -> bytes | None:
        """The last bytes of a value, or None; reads no others."""
        return self._tree.last(table + key, size)

    def copies(
        self, table: bytes, keys: Sequence[bytes], before: Callable[[int], None], room: Room
    ) -> list[memoryview | DamagedError | None]:
        """Copies of many values: each looked up once, and what is not in memory asked for while others are copied.

        Parameters
        ----------
        before : told the number of each before it is copied.
        """
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
                return self._tree.value(place, room, waits)
            except DamagedError as error:
                return error

        return [copied(number) for number in range(len(keys))]

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
        """Return True if the key has a value; the value is not read."""
        return self._tree.has(table + key)

    def keys(self, table: bytes, prefix: bytes = b"") -> Iterator[bytes]:
        """Keys in order. Use them up before the snapshot ends."""
        for key, _ in self._tree.items(table + prefix):
            yield key[len(table) :]

    def items(self, table: bytes, prefix: bytes = b"") -> Iterator[tuple[bytes, memoryview]]:
        """Keys and copied values in order."""
        for key, value in self._tree.values(table + prefix):
            yield key[len(table) :], value

    def sizes(self, table: bytes, prefix: bytes = b"") -> Iterator[tuple[bytes, int]]:
        """Keys and lengths of values, in order; reads no value."""
        for key, size in self._tree.items(table + prefix):
            yield key[len(table) :], size

    def touch(self, rows: list[tuple[bytes, bytes]]) -> None:
        """Look at what LMDB will meet when these (table, key) are put or deleted; raises DamagedError."""
        self._tree.check_free_list()
        for table, key in rows:
            self._tree.touch(table + key)

    def damaged_pages(self) -> Iterator[str]:
        """Report the damage of the pages that hold the keys, and of the list of free pages."""
        return damaged_pages(self._tree)

    def live_bytes_without(self, goes: Callable[[bytes, bytes], bool]) -> int:
        """Return about, and at most, the bytes of the pages in use without the rows for which `goes(table, key)` is
        true. A page that keeps some row counts whole, though LMDB may merge it with its neighbour. Of adjacent pages
        that become empty, one counts, too: it may receive rows of its neighbour."""
        page_bytes, gaps, beside = self._tree.meta.page_size, 0, 0
        way: list[int] = []  # pages from the root down to the one that is looked at
        pages: set[int] = set()
        stays = True
        for page, depth, node in self._tree.pages(1):
            way[depth - 1 :] = [page]
            if isinstance(node, Leaf):
                staying = [row for key, row in zip(node.keys, node.values, strict=True) if not goes(key[:1], key[1:])]
                gaps += stays and not staying
                stays = bool(staying)
                pages.update(way if stays else ())
                beside += sum(-(-(BIG_HEADER_BYTES + size) // page_bytes) for _, size, big in staying if big)
        return (META_PAGES + len(pages) + gaps + beside) * page_bytes

    def live_bytes(self) -> int:
        """Return the bytes of the pages in use, LMDB's two meta pages included; free pages do not count."""
        count = self._tree.meta.counts[1]
        return (META_PAGES + count.branches + count.leaves + count.beside) * self._tree.meta.page_size


def checked_payload(key: bytes, kind: Kind, data: memoryview, what: str) -> memoryview:
    """Return the contents of a value's envelope; raises DamagedError, which names the value by `what`."""
    with damage_of(what):
        return unseal(key, kind, data)


@contextlib.contextmanager
def damage_of(what: str, hint: str = REPAIR) -> Iterator[None]:
    """Name what is damaged, and what helps, in a DamagedError that is raised inside."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"{what} of the store is damaged: {error.message}", hint) from error
