"""Looking at ``data.mdb`` without LMDB, which kills the process that reads a damaged or truncated file.

The pages are those of LMDB 0.9 (data format 1) on a 64-bit machine: a 16-byte header, then node offsets, then nodes.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvtool.core.cache.layout import REBUILD
from kvtool.core.errors import DamagedError, KvtoolError, StoreFormatError

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)
_HEADER_BYTES, _NODE_BYTES = 16, 8
_BRANCH, _LEAF = 1, 2
_BIG_DATA = 1
_NO_PAGE = 2**64 - 1
_DEEPEST = 32


@dataclass(frozen=True, slots=True)
class Meta:
    """What a meta page says: page size, roots of the free list and of the data, last page, transaction."""

    page_size: int
    roots: tuple[int, int]
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
            if size < meta.file_bytes and not _holds_all(file, meta, size):
                raise DamagedError(f"{path} is truncated: {size} bytes of {meta.file_bytes}", REBUILD)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing", REBUILD) from error
    except OSError as error:
        raise KvtoolError(f"cannot read {path}: {error.strerror}", "check who owns the folder") from error


def _newest_meta(path: Path, file: BinaryIO) -> Meta:
    head = file.read(2 * max(_PAGE_SIZES))
    if not head:
        raise DamagedError(f"{path} is empty", REBUILD)
    first = _meta(path, head, 0)
    second = _meta(path, head, first.page_size)
    return max(first, second, key=lambda meta: meta.transaction)


def _meta(path: Path, head: bytes, at: int) -> Meta:
    """The meta page at `at`: magic, version, address, map size, two trees of 48 bytes, last page, transaction."""
    if len(head) < at + 4096:
        raise DamagedError(f"{path} is truncated", REBUILD)
    magic, version, page_size = struct.unpack_from("=II16xI", head, at + _HEADER_BYTES)
    if magic != _MAGIC or version != _VERSION:
        if at:
            raise DamagedError(f"{path}: its second meta page is damaged", REBUILD)
        raise StoreFormatError(f"{path} is not an LMDB file that this kvtool reads", REBUILD)
    if page_size not in _PAGE_SIZES:
        raise DamagedError(f"{path} states a page size of {page_size}", REBUILD)
    roots = (at + 16 + 24 + 40, at + 16 + 24 + 48 + 40)
    free, main = (struct.unpack_from("=Q", head, root)[0] for root in roots)
    last_page, transaction = struct.unpack_from("=QQ", head, at + 16 + 24 + 2 * 48)
    return Meta(page_size, (free, main), last_page, transaction)


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
