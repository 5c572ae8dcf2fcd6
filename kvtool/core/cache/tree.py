"""B+tree of LMDB, read out of the file by snapshots, each page checked before it is believed; and a whole file's check.

LMDB has no checksum over its pages: of one flipped bit in the header of a page or a node it dies (SIGSEGV, SIGBUS), and
takes the process with it. So keys are looked up here, in pages that are read like any other part of a file; a value is
one ``preadv``, faster than the map on a cold page cache (`kvtool help store-format`). LMDB itself pins the pages, by a
transaction, and writes; before it does, the pages on its way are looked at here, too (:meth:`Tree.touch`).
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import ParamSpec, Self, TypeAlias, TypeVar

import lmdb

from kvtool.core.cache.layout import REBUILD, REPAIR, RESCUE
from kvtool.core.cache.pages import (
    META_PAGES,
    NUMBER,
    Branch,
    Counts,
    Leaf,
    Meta,
    Value,
    meta_of,
    newest_meta,
    parse_page,
)
from kvtool.core.cache.record import Allocator, Kind, aligned, unseal
from kvtool.core.errors import DamagedError, KvtoolError, StoreFormatError

_BIG_HEADER = struct.Struct("=Q2xHI")  # own number, flags, number of pages
_OVERFLOW = 4  # flags of the first page of a large value
_NO_PAGE = 2**64 - 1
_BIG_HEADER_BYTES = _BIG_HEADER.size
_DEEPEST = 32
_LEAVES = 256  # kept parsed
_BRANCHES = 16384  # those of some million chunks: where they were not all kept, a push of these read one for each look
_NOW = getattr(os, "RWF_NOWAIT", 0)  # Linux: read what is in memory, and wait for nothing
_FREE, _DATA = 0, 1
_GIVEN_UP = 2**30  # bytes that a transaction may have taken at the end of the file and given up again, at most


class DataFile:
    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._tree: Tree | None = None
        self._length = 0  # as it was last looked at

    def close(self) -> None:
        os.close(self._handle)

    def is_file(self, status: os.stat_result) -> bool:
        return os.path.samestat(os.fstat(self._handle), status)

    def size(self) -> int:
        return os.fstat(self._handle).st_size

    def tree(self, transaction: int, page_size: int) -> Tree | None:
        """Return the data as of a held transaction; None: its meta page was just overwritten. Raises DamagedError."""
        if self._tree is None or self._tree.meta.transaction != transaction:
            meta = meta_of(self.read((transaction & 1) * page_size, page_size))
            if meta.transaction != transaction:
                return None
            self._tree = Tree(self, meta)
        return self._tree

    def read(self, at: int, size: int) -> bytes:
        data = os.pread(self._handle, size, at)
        if len(data) != size:
            raise DamagedError("the file is shorter than it says")
        return data

    def copy(
        self, at: int, head: int, size: int, allocate: Allocator = aligned, waits: Callable[[], None] | None = None
    ) -> tuple[bytes, memoryview]:
        """Read `head` bytes, and what follows them into a private, writable, aligned buffer. `waits` is called before a
        read from the disk, if the system reports that the data is not in memory. Raises DamagedError."""
        if at + head + size > self._length:
            self._length = self.size()
        if at + head + size > self._length:
            raise DamagedError("the index points outside the file")
        before, target = bytearray(head), allocate(size)
        done = 0 if waits is None else self._copy_cached(before, target, at)
        if done < head + size and waits is not None:
            waits()
        if done < head:
            done = os.preadv(self._handle, [before, target], at)
        while head <= done < head + size:
            count = os.preadv(self._handle, [target[done - head :]], at + done)
            if count <= 0:
                break
            done += count
        if done != head + size:
            raise DamagedError("the file is shorter than it says")
        return bytes(before), target

    def _copy_cached(self, before: bytearray, target: memoryview, at: int) -> int:
        """Read what is in memory already, and return how many bytes that was; 0 if that is unknown."""
        if not _NOW:
            return 0
        try:
            return os.preadv(self._handle, [before, target], at, _NOW)
        except OSError:  # nothing of it is, or this file system waits always
            return 0

    def will_need(self, at: int, size: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, at, size, os.POSIX_FADV_WILLNEED)


class Tree:
    """Keys and values as of one transaction. Every method raises DamagedError if a page on its way is damaged."""

    def __init__(self, file: DataFile, meta: Meta) -> None:
        self.meta = meta
        self._file = file
        self._branches: dict[int, Branch] = {}
        self._leaves: dict[int, Leaf] = {}

    # ---- looking up ----

    def get(self, key: bytes, most: int | None = None) -> memoryview | None:
        """Return a private, writable copy of a value, or of its first `most` bytes; None: no such key."""
        entry = self.find(key)
        return None if entry is None else self.value(entry, most)

    def find(self, key: bytes) -> Value | None:
        return _found(self._leaf_of(key), key)

    def last(self, key: bytes, most: int) -> bytes | None:
        """Return the last `most` bytes of a value; None: no such key."""
        entry = self.find(key)
        if entry is None:
            return None
        length = min(most, entry.size)
        if not entry.big:
            return entry.data[entry.start + entry.size - length : entry.start + entry.size]
        return self._file.read(self.big_at(entry) + _BIG_HEADER_BYTES + entry.size - length, length)

    def value(
        self,
        entry: Value,
        most: int | None = None,
        allocate: Allocator = aligned,
        waits: Callable[[], None] | None = None,
    ) -> memoryview:
        length = entry.size if most is None else min(most, entry.size)
        if not entry.big:
            return memoryview(bytearray(entry.data[entry.start : entry.start + length]))
        at = self.big_at(entry)
        header, value = self._file.copy(at, _BIG_HEADER_BYTES, length, allocate, waits)
        self._check_big(at, header, entry.size)
        return value

    def big_at(self, entry: Value) -> int:
        page = int(NUMBER.unpack_from(entry.data, entry.start)[0])
        self._check_inside(page)
        at = page * self.meta.page_size
        if at + _BIG_HEADER_BYTES + entry.size > self.meta.file_bytes:
            raise DamagedError("the index points outside the file")
        return at

    def pages_of(self, entry: Value) -> tuple[int, int]:
        at = self.big_at(entry)
        header = self._file.read(at, _BIG_HEADER_BYTES)
        return at // self.meta.page_size, self._check_big(at, header, entry.size)

    def will_need(self, entry: Value) -> None:
        if entry.big:
            self._file.will_need(self.big_at(entry), _BIG_HEADER_BYTES + entry.size)

    def items(self, start: bytes) -> Iterator[tuple[bytes, int]]:
        for key, entry in self._from(start):
            yield key, entry.size

    def values(self, start: bytes) -> Iterator[tuple[bytes, memoryview]]:
        """Yield the keys with this prefix, in order, and private copies of their values: each page is read once."""
        for key, entry in self._from(start):
            yield key, self.value(entry)

    def _from(self, start: bytes) -> Iterator[tuple[bytes, Value]]:
        for leaf in (node for _, _, node in self.pages(_DATA, start) if isinstance(node, Leaf)):
            for at in range(bisect_left(leaf.keys, start), len(leaf.keys)):
                if not leaf.keys[at].startswith(start):
                    return
                yield leaf.keys[at], leaf.value(at)

    def touch(self, key: bytes) -> None:
        """Check every page that LMDB may meet when it puts or deletes a key: the way down, and its neighbours."""
        entry = _found(self._leaf_of(key, neighbours=True), key)
        if entry is not None and entry.big:
            self.pages_of(entry)

    def _leaf_of(self, key: bytes, neighbours: bool = False) -> Leaf | None:
        """Walk down to the leaf that may have a key; `neighbours`: read the pages next to those on the way, too."""
        page = self.meta.roots[1]
        if page == _NO_PAGE:
            return None
        low, high = b"", None
        for _ in range(_DEEPEST):
            node = self._node(page, low, high)
            if isinstance(node, Leaf):
                return node
            at = _child_at(node, key)
            for beside in (at - 1, at + 1) if neighbours else ():
                if 0 <= beside < len(node.children):
                    self._node(node.children[beside], *_bounds(node, beside, low, high))
            page, (low, high) = node.children[at], _bounds(node, at, low, high)
        raise DamagedError("the pages of the index lie in a ring")

    def pages(self, number: int, start: bytes = b"") -> Iterator[tuple[int, int, Branch | Leaf]]:
        """Yield the pages of the free list (0) or the data (1), each with its depth, a parent before its children.
        `start`: without the pages of the data whose keys are all lower."""
        root = self.meta.roots[number]
        if root == _NO_PAGE:
            return
        waiting: list[tuple[int, int, bytes, bytes | None]] = [(root, 1, b"", None)]
        while waiting:
            page, depth, low, high = waiting.pop()
            if depth > _DEEPEST:
                raise DamagedError("the pages of the index lie in a ring")
            node = self._node(page, low, high) if number else self._parse(page, ordered=False)
            yield page, depth, node
            if isinstance(node, Branch):
                for at in reversed(range(_child_at(node, start) if start else 0, len(node.children))):
                    bounds = _bounds(node, at, low, high) if number else (b"", None)
                    waiting.append((node.children[at], depth + 1, *bounds))

    # ---- checks ----

    def free_pages(self, full: bool = True) -> Iterator[int]:
        """Yield the pages that nothing uses. Not `full`: only check each list's length, and yield nothing."""
        last = 0
        for _, _, leaf in self.pages(0):
            for at, key in enumerate(leaf.keys if isinstance(leaf, Leaf) else ()):
                entry = leaf.value(at)  # type: ignore[union-attr]
                freed = NUMBER.unpack(key)[0] if len(key) == NUMBER.size else _NO_PAGE
                if not last < freed <= self.meta.transaction:
                    raise DamagedError("the list of free pages is damaged")
                last = freed
                data = self.value(entry, None if full else NUMBER.size)
                count = NUMBER.unpack_from(data)[0] if len(data) >= NUMBER.size else _NO_PAGE
                if (count + 1) * NUMBER.size > entry.size:
                    raise DamagedError("the list of free pages is damaged")
                if full:
                    yield from struct.unpack_from(f"={count}Q", data, NUMBER.size)

    # ---- pages ----

    def _node(self, page: int, low: bytes, high: bytes | None) -> Branch | Leaf:
        node = self._branches.get(page) or self._leaves.get(page)
        if node is None:
            node = self._parse(page)
            nodes, most = (self._branches, _BRANCHES) if isinstance(node, Branch) else (self._leaves, _LEAVES)
            if len(nodes) >= most:
                nodes.clear()
            nodes[page] = node  # type: ignore[assignment]
        keys, first = node.keys, int(isinstance(node, Branch))  # a branch's first key says nothing
        if len(keys) > first and (keys[first] < low or (high is not None and keys[-1] >= high)):
            raise DamagedError(f"page {page} of the index does not hold the keys that its parent says")
        return node

    def _parse(self, page: int, ordered: bool = True) -> Branch | Leaf:
        self._check_inside(page)
        size = self.meta.page_size
        return parse_page(page, self._file.read(page * size, size), ordered)

    def _check_inside(self, page: int) -> None:
        if not 2 <= page <= self.meta.last_page:
            raise DamagedError("the index points outside the file")

    def _check_big(self, at: int, header: bytes, size: int) -> int:
        page = at // self.meta.page_size
        number, flags, pages = _BIG_HEADER.unpack(header)
        too_few = pages * self.meta.page_size < len(header) + size
        if number != page or flags != _OVERFLOW or too_few or page + pages - 1 > self.meta.last_page:
            raise DamagedError(f"the pages of a value, from {page} on, are not what the index says", RESCUE)
        return int(pages)


def _found(leaf: Leaf | None, key: bytes) -> Value | None:
    if leaf is None:
        return None
    at = bisect_left(leaf.keys, key)
    return leaf.value(at) if at < len(leaf.keys) and leaf.keys[at] == key else None


def _child_at(node: Branch, key: bytes) -> int:
    return max(0, bisect_right(node.keys, key, 1) - 1)


def _bounds(node: Branch, at: int, low: bytes, high: bytes | None) -> tuple[bytes, bytes | None]:
    return node.keys[at] if at else low, node.keys[at + 1] if at + 1 < len(node.keys) else high


def check_data_file(generation: Path) -> None:
    """Refuse a ``data.mdb`` that would hang, be taken for a new store, or kill the process when LMDB reads it. Raises
    StoreFormatError, DamagedError, KvtoolError."""
    path = generation / "data.mdb"
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise StoreFormatError(f"{path} is not a regular file", REBUILD)
        with path.open("rb") as file:
            meta = newest_meta(path, file)
            size = os.fstat(file.fileno()).st_size
        short = meta.file_bytes - size
        if short > _GIVEN_UP or (short > 0 and not _holds_all(path, meta, size)):
            raise DamagedError(f"{path} is truncated: {size} bytes of {meta.file_bytes}", REBUILD)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing", REBUILD) from error
    except OSError as error:
        raise KvtoolError(f"cannot read {path}: {error.strerror}", "check who owns the folder") from error


def _holds_all(path: Path, meta: Meta, size: int) -> bool:
    """True if every page in use is inside a file that is shorter than its last page. That happens without damage: LMDB
    does not write a page that one transaction took at the end and freed again."""
    with closing(DataFile(path)) as file:
        tree = Tree(file, meta)
        try:
            return all(
                tree.big_at(entry) + _BIG_HEADER_BYTES + entry.size <= size
                for number in (_FREE, _DATA)
                for *_, node in tree.pages(number)
                for entry in _large_values(node)
            )
        except DamagedError:  # a page of the tree is outside the file, or cannot be read
            return False


def _large_values(node: Branch | Leaf) -> list[Value]:
    return [node.value(at) for at, (*_, big) in enumerate(node.places) if big] if isinstance(node, Leaf) else []


def damaged_pages(tree: Tree) -> Iterator[str]:
    """Describe the damage in words. Memory: a byte for each page of the file."""
    try:
        used = bytearray(tree.meta.last_page + 1)
        yield from _damaged_tree(tree, _DATA, used)
        yield from _damaged_tree(tree, _FREE, used)
        for page in tree.free_pages():
            if not 2 <= page <= tree.meta.last_page or used[page]:
                raise DamagedError("the list of free pages names pages that are in use")
            used[page] = 1
        if used.count(0) != 2:  # the meta pages
            yield "there are pages that are neither in use nor free"
    except DamagedError as error:
        yield error.message


def _damaged_tree(tree: Tree, number: int, used: bytearray) -> Iterator[str]:
    branches = leaves = keys = beside = deepest = 0
    for page, depth, node in tree.pages(number):
        deepest = max(deepest, depth)
        branches += isinstance(node, Branch)
        if isinstance(node, Leaf):
            leaves, keys = leaves + 1, keys + len(node.keys)
        values = [tree.pages_of(entry) for entry in _large_values(node)]  # first page and number of pages of each
        beside += sum(pages for _, pages in values)
        for at, pages in [(page, 1), *values]:
            if any(used[at : at + pages]):
                raise DamagedError(f"page {at} of the index is used twice")
            used[at : at + pages] = b"\1" * pages
    counted = tree.meta.counts[number]
    seen = Counts(deepest, branches, leaves, beside, keys)
    if counted != seen:
        content = "data" if number else "free pages"
        yield f"the index of {content} has {seen}; counted are {counted}"


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
