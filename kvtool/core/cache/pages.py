"""The meta pages of ``data.mdb``, read without LMDB, which kills the process that reads a damaged or truncated file.

They are those of LMDB 0.9 (data format 1) on a 64-bit machine.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvtool.core.cache.layout import REBUILD
from kvtool.core.errors import DamagedError, StoreFormatError

META_PAGES = 2
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)
_HEADER_BYTES = 16
_META_BYTES = _HEADER_BYTES + 24 + 2 * 48 + 16
_TREE = struct.Struct("=IHHQQQQQ")  # page size (of the free list's), flags, depth, pages of three kinds, keys, root
_META_FLAG, _INTEGER_KEYS = 8, 8
_BETWEEN_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a tree in a meta page: its depth, and the number of its pages and keys."""

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
    """Contents of a meta page.

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


def newest_meta(path: Path, file: BinaryIO) -> Meta:
    """The later of the two meta pages, which are written in turn. Raises DamagedError, StoreFormatError."""
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
    of_first, of_second = first.transaction, second.transaction
    if (of_first or of_second) and (of_first % 2 or not of_second % 2 or abs(of_first - of_second) != 1):
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
