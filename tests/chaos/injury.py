"""Injured bytes: where a bit is flipped or a file is cut. Seeded: the same number, the same faults.

Which bytes of a `data.mdb` are in use is read here by LMDB's description of its pages, and by none of kvtool's code.
"""

from __future__ import annotations

import os
import random
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.cache import tables
from kvtool.core.cache.identity import ID_BYTES

if TYPE_CHECKING:
    from tests.chaos.invariants import Subject

_NOTES = {"access.log", "served.log", "writer.lock", "writer.json", "lock.mdb", "head.lock"}
_VALUES = 8  # of ten flips in data.mdb hit a value, a page of the tree or the meta page; the others fall anywhere


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault.

    Attributes
    ----------
    part : `store`, `tier` or `pack`. `file` : in it; "." where it is a file itself.
    kind : what is hit, for the table. `live` : whether anything is kept there.
    at : the byte, or the length that is left. `bit` : None: the file is cut.
    """

    part: str
    file: str
    kind: str
    at: int
    bit: int | None
    live: bool = True

    def strike(self, copy: Path) -> None:
        path = copy if self.file == "." else copy / self.file
        if self.bit is None:
            os.truncate(path, self.at)
            return
        path.write_bytes(flip_bit(path.read_bytes(), self.at, self.bit))

    def __str__(self) -> str:
        what = "cut" if self.bit is None else f"bit {self.bit}"
        return f"{self.part}/{self.file} at {self.at}, {what} ({self.kind})"


def flip_bit(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


@dataclass(frozen=True, slots=True)
class Target:
    """A file, and the regions of it that are hit one as likely as the other, by kind."""

    part: str
    file: str
    size: int
    regions: dict[str, list[Region]]
    notes: bool = False


def targets_of(subject: Subject) -> list[Target]:
    pack = _whole("pack", ".", subject.pack, "pack")
    return [*_store_targets(subject.store), *_folder_targets("tier", subject.tier), pack]


def _store_targets(store: Path) -> Iterator[Target]:
    for target in _folder_targets("store", store):
        if target.file.endswith("data.mdb"):
            regions = defaultdict(list)
            for region in live_regions(store / target.file):
                regions[region.kind].append(region)
            yield Target("store", target.file, target.size, dict(regions))
        else:
            yield target


def _folder_targets(part: str, folder: Path) -> Iterator[Target]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size:
            name = path.relative_to(folder).as_posix()
            yield _whole(part, name, path, f"{part}: {_sort_of(name)}")


def _whole(part: str, file: str, path: Path, kind: str) -> Target:
    data = path.read_bytes()
    regions = [Region(0, len(data), kind)]
    if path.suffix == ".json" or path.name == "current":  # space between words says nothing
        regions = [Region(at, at + 1, kind) for at, byte in enumerate(data) if not chr(byte).isspace()]
    return Target(part, file, len(data), {kind: regions}, path.name in _NOTES)


def _sort_of(name: str) -> str:
    if name.startswith("index/vectors"):
        return "vectors"
    if name.startswith("index/words"):
        return "word index"
    return name.split("/")[0] if "/" in name else name


def flips(subject: Subject, count: int, seed: int) -> list[Fault]:
    """Half in the store's values and pages, a quarter in its other files, the rest in tier and pack."""
    dice, targets = random.Random(seed), targets_of(subject)
    return [_flip(dice, _pick(dice, targets)) for _ in range(count)]


def cuts(subject: Subject, count: int, seed: int) -> list[Fault]:
    dice, targets = random.Random(seed), targets_of(subject)
    found = []
    for _ in range(count):
        target = _pick(dice, targets)
        kind = "data file" if target.file.endswith("data.mdb") else next(iter(target.regions))
        at = dice.randrange(target.size)
        live = not target.notes and any(one.stop > at for own in target.regions.values() for one in own)
        found.append(Fault(target.part, target.file, kind, at, None, live))
    return found


def _pick(dice: random.Random, targets: list[Target]) -> Target:
    groups: dict[str, list[Target]] = defaultdict(list)
    for target in targets:
        groups[_group(target)].append(target)
    weights = {"data": 50, "index": 18, "small": 7, "tier": 17, "pack": 8}
    names = sorted(groups)
    name = dice.choices(names, [weights[one] for one in names])[0]
    kinds: dict[str, list[Target]] = defaultdict(list)  # a tier has hundreds of records, and one head
    for target in groups[name]:
        kinds[next(iter(target.regions))].append(target)
    return dice.choice(kinds[dice.choice(sorted(kinds))])


def _group(target: Target) -> str:
    if target.part != "store":
        return target.part
    if target.file.endswith("data.mdb"):
        return "data"
    return "index" if target.file.startswith("index/") else "small"


def _flip(dice: random.Random, target: Target) -> Fault:
    if target.file.endswith("data.mdb") and dice.randrange(10) >= _VALUES:
        at = dice.randrange(target.size)
        kind = next((k for k, all_of in target.regions.items() if any(r.start <= at < r.stop for r in all_of)), "")
        return Fault(target.part, target.file, kind or "free space", at, dice.randrange(8), bool(kind))
    kind = dice.choice(sorted(target.regions))
    region = dice.choice([one for one in target.regions[kind] if one.stop > one.start])
    at = dice.randrange(region.start, region.stop)
    return Fault(target.part, target.file, kind, at, dice.randrange(8), not target.notes and kind != AGE)


# ---- regions of a data.mdb in use ----


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
