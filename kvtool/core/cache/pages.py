"""Looking at ``data.mdb`` without LMDB, which kills the process that reads a damaged or truncated file.

The pages are those of LMDB 0.9 (data format 1) on a 64-bit machine: a 16-byte header, then node offsets, then nodes.
"""

from __future__ import annotations

import os
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvtool.core.cache.layout import REBUILD
from kvtool.core.errors import DamagedError, KvtoolError, StoreFormatError

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)
_HEADER_BYTES, _NODE_BYTES = 16, 8
_META_BYTES = _HEADER_BYTES + 24 + 2 * 48 + 16
_TREE = struct.Struct("=IHHQQQQQ")  # page size (of the free list's), flags, depth, pages of three kinds, keys, root
_META_FLAG, _INTEGER_KEYS = 8, 8
_BETWEEN_SECONDS = 0.01
_GIVEN_UP = 2**30  # bytes that a transaction may have taken at the end of the file and given up again, at most
_BRANCH, _LEAF = 1, 2
_BIG_DATA = 1
_NO_PAGE = 2**64 - 1
_DEEPEST = 32


@dataclass(frozen=True, slots=True)
class Counts:
    """What a meta page says of a tree: its depth, and how many pages and keys it has."""

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
    """What a meta page says.

    Attributes
    ----------
    roots, counts : of the list of free pages, and of the data.
    """

    page_size: int
    roots: tuple[int, int]
    counts: tuple[Counts, Counts]
    last_page: int
    transaction: int

    @property
    def file_bytes(self) -> int:
        """Length of a file that holds every page."""
        return (self.last_page + 1) * self.page_size


def check_data_file(generation: Path) -> None:
    """Refuse a ``data.mdb`` that would hang, be taken for a new store, or kill the process when read.

    Raises
    ------
    StoreFormatError : not a regular file, or not LMDB 0.9's.
    DamagedError : missing, empty or shorter than the pages in use.
    """
    path = generation / "data.mdb"
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise StoreFormatError(f"{path} is not a regular file", REBUILD)
        with path.open("rb") as file:
            meta = _newest_meta(path, file)
            size = os.fstat(file.fileno()).st_size
            short = meta.file_bytes - size
            if short > _GIVEN_UP or (short > 0 and not _holds_all(file, meta, size)):
                raise DamagedError(f"{path} is truncated: {size} bytes of {meta.file_bytes}", REBUILD)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing", REBUILD) from error
    except OSError as error:
        raise KvtoolError(f"cannot read {path}: {error.strerror}", "check who owns the folder") from error


def _newest_meta(path: Path, file: BinaryIO) -> Meta:
    """Of the two meta pages, which are written in turn."""
    for attempt in range(3):
        file.seek(0)
        head = file.read(2 * max(_PAGE_SIZES))
        if not head:
            raise DamagedError(f"{path} is empty", REBUILD)
        if head[: _HEADER_BYTES + 8].count(0) != _HEADER_BYTES + 8 and not _is_lmdb(head):
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


def _is_lmdb(head: bytes) -> bool:
    return len(head) < _META_BYTES or struct.unpack_from("=II", head, _HEADER_BYTES) == (_MAGIC, _VERSION)


def _newer(first: Meta, second: Meta) -> Meta:
    """Transactions alternate between the pages, so one follows the other; raises DamagedError."""
    one, two = first.transaction, second.transaction
    if (one or two) and (one % 2 or not two % 2 or abs(one - two) != 1):
        raise DamagedError("its meta pages do not follow each other")
    if first.page_size != second.page_size:
        raise DamagedError("its meta pages state two page sizes")
    return max(first, second, key=lambda meta: meta.transaction)


def meta_of(page: bytes) -> Meta:
    """A meta page: magic, version, address, map size, two trees of 48 bytes, last page, transaction.

    Raises
    ------
    DamagedError : it is none, or says what LMDB never says under the flags that we open it with.
    """
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


def _holds_all(file: BinaryIO, meta: Meta, size: int) -> bool:
    """Whether every page in use lies inside a file that is shorter than its last page.

    That happens without damage: LMDB does not write a page that one transaction took at the end and gave up again.
    """
    try:
        return all(_walk(file, meta, root, size, 0) for root in meta.roots if root != _NO_PAGE)
    except (struct.error, RecursionError):
        return False


def _walk(file: BinaryIO, meta: Meta, page: int, size: int, depth: int) -> bool:
    if depth > _DEEPEST or (page + 1) * meta.page_size > size:
        return False
    file.seek(page * meta.page_size)
    data = file.read(meta.page_size)
    flags, lower = struct.unpack_from("=HH", data, 10)
    nodes = struct.unpack_from(f"={max(0, lower - _HEADER_BYTES) // 2}H", data, _HEADER_BYTES)
    if flags & _BRANCH:
        return all(_walk(file, meta, _child(data, at), size, depth + 1) for at in nodes)
    return bool(flags & _LEAF) and all(_big_value_fits(meta, data, at, size) for at in nodes)


def _child(data: bytes, at: int) -> int:
    low, high, top = struct.unpack_from("=HHH", data, at)
    return int(low | high << 16 | top << 32)


def _big_value_fits(meta: Meta, data: bytes, at: int, size: int) -> bool:
    length, flags, key_bytes = struct.unpack_from("=IHH", data, at)
    if not flags & _BIG_DATA:
        return True
    page = struct.unpack_from("=Q", data, at + _NODE_BYTES + key_bytes)[0]
    return bool(page * meta.page_size + _HEADER_BYTES + length <= size)
