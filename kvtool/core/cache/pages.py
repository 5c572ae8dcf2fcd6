"""Pages of ``data.mdb`` (LMDB 0.9, data format 1, on a 64-bit machine), parsed and checked without LMDB, which kills
the process that reads a damaged or truncated file."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kvtool.core.cache.layout import REBUILD, RESCUE
from kvtool.core.errors import DamagedError, StoreFormatError

META_PAGES = 2
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)
_HEADER_BYTES = 16
_META_BYTES = _HEADER_BYTES + 24 + 2 * 48 + 16
_TREE = struct.Struct("=IHHQQQQQ")  # page size (of the free list's), flags, depth, pages of three kinds, keys, root
_META_FLAG, _INTEGER_KEYS = 8, 8
_BETWEEN_SECONDS = 0.01
_HEADER = struct.Struct("=Q2xHHH")  # own number, flags, end of the pointers, start of the nodes
_NODE = struct.Struct("=HHHH")  # size (low, high) or child (low, middle, high with the flags), flags, size of the key
NUMBER = struct.Struct("=Q")
_BRANCH, _LEAF = 1, 2
_BIG = 1


@dataclass(frozen=True, slots=True)
class Counts:
    depth: int
    branches: int
    leaves: int
    beside: int
    keys: int

    def __str__(self) -> str:
        pages = self.branches + self.leaves
        return f"{self.keys} keys in {pages} pages, {self.beside} beside them, {self.depth} deep"


@dataclass(frozen=True, slots=True)
class Meta:
    """A meta page; `roots` and `counts` of the list of free pages, and of the data."""

    page_size: int
    roots: tuple[int, int]
    counts: tuple[Counts, Counts]
    last_page: int
    transaction: int

    @property
    def file_bytes(self) -> int:
        return (self.last_page + 1) * self.page_size


def newest_meta(path: Path, file: BinaryIO) -> Meta:
    """Read the later of the two meta pages, which are written in turn. Raises DamagedError, StoreFormatError."""
    for attempt in range(3):
        file.seek(0)
        head = file.read(2 * max(_PAGE_SIZES))
        if not head:
            raise DamagedError(f"{path} is empty", REBUILD)
        is_lmdb = len(head) < _META_BYTES or struct.unpack_from("=II", head, _HEADER_BYTES) == (_MAGIC, _VERSION)
        if head[: _HEADER_BYTES + 8].count(0) != _HEADER_BYTES + 8 and not is_lmdb:
            raise StoreFormatError(f"{path} is not an LMDB file that this kvtool reads", REBUILD)
        try:
            first = meta_of(head)
            second = meta_of(head[first.page_size :])
            return _newer(first, second)
        except DamagedError as error:
            if attempt == 2:
                raise DamagedError(f"{path}: {error.message}", REBUILD) from error
        time.sleep(_BETWEEN_SECONDS)  # a writer may have been at it between one page and the other
    raise AssertionError("unreachable")


def _newer(first: Meta, second: Meta) -> Meta:
    """Choose the newer one: transactions alternate between the pages. Raises DamagedError if they do not."""
    of_first, of_second = first.transaction, second.transaction
    if (of_first or of_second) and (of_first % 2 or not of_second % 2 or abs(of_first - of_second) != 1):
        raise DamagedError("its meta pages do not follow each other")
    if first.page_size != second.page_size:
        raise DamagedError("its meta pages state two page sizes")
    return max(first, second, key=lambda meta: meta.transaction)


def meta_of(page: bytes) -> Meta:
    """Parse a meta page: magic, version, address, map size, two trees of 48 bytes, last page, transaction. Raises
    DamagedError, also for values that LMDB never writes under our flags."""
    if len(page) < _META_BYTES:
        raise DamagedError("it is truncated")
    number, *header = struct.unpack_from("=QHHHH", page)
    if number > 1 or header != [0, _META_FLAG, 0, 0]:
        raise DamagedError("a meta page is damaged")
    if struct.unpack_from("=IIQ", page, _HEADER_BYTES) != (_MAGIC, _VERSION, 0):
        raise DamagedError("a meta page is damaged")
    free, main = (_TREE.unpack_from(page, _HEADER_BYTES + at) for at in (24, 24 + _TREE.size))
    last_page, transaction = struct.unpack_from("=QQ", page, _HEADER_BYTES + 24 + 2 * _TREE.size)
    if free[0] not in _PAGE_SIZES or (free[1], main[0], main[1]) != (_INTEGER_KEYS, 0, 0) or last_page < 1:
        raise DamagedError("a meta page is damaged")
    counts = (Counts(*free[2:7]), Counts(*main[2:7]))
    return Meta(free[0], (free[7], main[7]), counts, last_page, transaction)


@dataclass(frozen=True, slots=True)
class Branch:
    """Keys from which each child on is meant; the first child has all below the second's."""

    keys: list[bytes]
    children: list[int]


class Value(NamedTuple):
    """Where a value begins in the page `data`, its size, and whether it has separate pages, whose first is there."""

    data: bytes
    start: int
    size: int
    big: bool


@dataclass(frozen=True, slots=True)
class Leaf:
    """Keys and, for each, all of its `Value` but the page."""

    keys: list[bytes]
    places: list[tuple[int, int, bool]]
    data: bytes

    def value(self, at: int) -> Value:
        return Value(self.data, *self.places[at])


def parse_page(page: int, data: bytes, ordered: bool = True) -> Branch | Leaf:
    """Parse a page of a tree, which has to state its own number. Keys that are numbers (of the list of free pages) are
    not `ordered` by their bytes. Raises DamagedError."""
    number, flags, lower, upper = _HEADER.unpack_from(data)
    if number != page or flags not in (_BRANCH, _LEAF):
        raise DamagedError(f"page {page} of the index is not a page of a tree", RESCUE)
    if not _HEADER.size <= lower <= upper <= len(data) or lower % 2:
        raise DamagedError(f"page {page} of the index has bounds that cannot be")
    pointers = struct.unpack_from(f"={(lower - _HEADER.size) // 2}H", data, _HEADER.size)
    try:
        nodes = [(at + _NODE.size, *_NODE.unpack_from(data, at)) for at in pointers]  # each with its key's place
        keys = [data[at : at + length] for at, _, _, _, length in nodes]
        node: Branch | Leaf
        if flags == _BRANCH:
            if not nodes:
                raise ValueError("a branch without children")
            ends = [at + length for at, _, _, _, length in nodes]
            children = [low | middle << 16 | high << 32 for _, low, middle, high, _ in nodes]
            node, compared = Branch(keys, children), keys[1:]
        else:
            if any(kind not in (0, _BIG) for _, _, _, kind, _ in nodes):
                raise ValueError("a value of a kind that is not used here")
            values = [(at + length, low | high << 16, bool(kind)) for at, low, high, kind, length in nodes]
            ends = [start + (NUMBER.size if big else size) for start, size, big in values]
            node, compared = Leaf(keys, values, data), keys
        _check_layout(data, pointers, ends, upper)
        if ordered and any(before >= after for before, after in pairwise(compared)):
            raise ValueError("its keys are not in order")
        return node
    except (ValueError, struct.error) as error:
        raise DamagedError(f"page {page} of the index is damaged: {error}") from error


def _check_layout(data: bytes, starts: tuple[int, ...], ends: list[int], upper: int) -> None:
    at = upper
    for start, end in sorted(zip(starts, ends, strict=True)):
        if start != at:
            raise ValueError("its parts do not join")
        at = end + end % 2
    if at != len(data):
        raise ValueError("its parts do not fill it")
