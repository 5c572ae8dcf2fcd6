"""Faults: where a bit is flipped or a file is cut. Seeded: the same number, the same faults."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.harness.live import AGE, Region, live_regions
from tests.faults.harness.subject import Subject

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
