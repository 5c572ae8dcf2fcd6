"""Bytes of a `data.mdb` that hold something, and what: a fault in a free page is not one that was missed.

Written against LMDB's own description of its pages, and against none of kvtool's code.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from kvtool.core.cache import tables
from kvtool.core.cache.identity import ID_BYTES

PAGE = 4096
_META_LIVE = 16 + 136  # header and MDB_meta
_BRANCH, _LEAF, _BIG = 1, 2, 1
_NONE = 2**64 - 1
AGE = "age of free pages"  # another one is noticed where the order is another; else it says nothing of any value


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes from `start` to `stop` that are of one kind."""

    start: int
    stop: int
    kind: str


def live_regions(path: Path) -> list[Region]:
    data = path.read_bytes()
    numbers = [struct.unpack_from("=Q", data, at * PAGE + 16 + 24 + 96 + 8)[0] for at in (0, 1)]
    newest = max((0, 1), key=lambda at: numbers[at])
    start = newest * PAGE  # but for the map's size, which each process that opens it chooses
    found = [Region(start + at, start + to, "meta page in use") for at, to in ((0, 32), (40, _META_LIVE))]
    free, main = (struct.unpack_from("=Q", data, newest * PAGE + 16 + 24 + at + 40)[0] for at in (0, 48))
    _walk(data, free, "list of free pages", found)
    _walk(data, main, "", found)
    return sorted((one for one in found if one.stop > one.start), key=lambda one: one.start)


def _walk(data: bytes, page: int, free: str, found: list[Region]) -> None:
    if page == _NONE:
        return
    at = page * PAGE
    flags, lower = struct.unpack_from("=HH", data, at + 10)
    found += [Region(at, at + 8, free or "tree page"), Region(at + 10, at + lower, free or "tree page")]  # 8: never set
    for pointer in struct.unpack_from(f"={(lower - 16) // 2}H", data, at + 16):
        node = at + pointer
        low, high, more, key_bytes = struct.unpack_from("=HHHH", data, node)
        value = node + 8 + key_bytes
        found.append(Region(node, node + 8, free or "tree page"))
        found.append(Region(node + 8, value, AGE if free else "tree page"))
        if flags & _BRANCH:
            _walk(data, low | high << 16 | more << 32, free, found)
            continue
        length = low | high << 16
        kind = free or _kind_of(data[node + 8 : value])
        if more & _BIG:
            found.append(Region(value, value + 8, free or "tree page"))
            big = struct.unpack_from("=Q", data, value)[0] * PAGE
            found += [Region(big, big + 8, free or "page header"), Region(big + 10, big + 16, free or "page header")]
            value = big + 16
        found.append(Region(value, value + length, kind))


def _kind_of(key: bytes) -> str:
    table, rest = key[:1], key[1:]
    if table == tables.RECORDS:
        length = rest[ID_BYTES]
        return f"KV {rest[ID_BYTES + 1 : ID_BYTES + 1 + length].decode()}"
    return tables.TABLE_NAMES.get(table, "other tables")
