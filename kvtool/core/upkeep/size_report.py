"""Size report of a store that is too large: its parts in bytes, the smallest plan, and what else would help."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from kvtool.core.cache import space, tables
from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.keys import name_key, split_record_key
from kvtool.core.cache.rows import BY_CHUNK
from kvtool.core.cache.store import Store
from kvtool.core.common.sizes import shown_size, size_in_bytes
from kvtool.core.errors import DamagedError, UsageError
from kvtool.core.upkeep.inventory import DocumentHolding, Inventory, pages
from kvtool.core.upkeep.plan import NOTHING, Plan

_PARTS = {
    "pinned": "pinned",
    "text": "of text",
    "chunks": "known of chunks beside their KV",
    "beginning": "of KV of the prompt's own beginning",
    "profiles": "of the codec's profile",
    "beside": "of index and logs",
    "free": "free in the file",
    "other": "of other KV and of what finds it",
}
_WAYS = {
    "free": "without --no-compact free pages go back to the disk",
    "pinned": "`kvtool store unpin` lets what is pinned go",
    "text": "--unused 30d or --max-age forgets documents",
}


def left_by(store: Store, inventory: Inventory, plan: Plan, profiles: Collection[bytes]) -> int:
    """Bytes of the folder's files once a plan is carried out and the store compacted, at most; closer than the plan's
    own sum, which leaves the pages out that find what goes.

    Parameters
    ----------
    profiles : digests of those that go beside the plan's own.
    """
    drops = {drop for step in plan.steps for drop in step.drops}
    loose, gone = _going(plan, profiles)
    names = frozenset(map(name_key, plan.sources))
    going = dict.fromkeys(BY_CHUNK, loose) | dict.fromkeys((tables.DOCUMENTS, tables.FILES), names)
    going[tables.STRETCHES] = frozenset(one for step in plan.steps for one in step.stretches)
    going[tables.PROFILES] = gone

    def goes(table: bytes, key: bytes) -> bool:
        if key[:ID_BYTES] in going.get(table, ()) or key in going.get(table, ()):
            return True
        return table in (tables.RECORDS, tables.LEVELS) and (key[:ID_BYTES], _level(table, key)) in drops

    with store.snapshot() as snapshot:
        return inventory.used - store.environment.file_bytes() + snapshot.live_bytes_without(goes)


def _level(table: bytes, key: bytes) -> str:
    try:
        return key[ID_BYTES:].decode("ascii") if table == tables.LEVELS else split_record_key(key)[1]
    except (DamagedError, UnicodeDecodeError):  # found by verify
        return ""


def _going(plan: Plan, profiles: Collection[bytes]) -> tuple[frozenset[bytes], frozenset[bytes]]:
    """Return the chunks of which everything goes, and the profiles that go, `profiles` among them."""
    loose = frozenset(chunk for step in plan.steps for chunk in step.loose)
    return loose, frozenset(profiles).union(*(step.profiles for step in plan.steps))


@dataclass(frozen=True, slots=True)
class Remains:
    """The remaining parts of a store.

    Attributes
    ----------
    parts : bytes by kind (:func:`remaining`).
    ways : combinations of measures that meet the limit: single ones, or all together; empty if all together do not
        suffice.
    """

    parts: Mapping[str, int]
    ways: tuple[tuple[str, ...], ...] = ()

    def told(self) -> str:
        """The parts, in words."""
        return ", ".join(f"{shown_size(size)} {_PARTS[part]}" for part, size in self.parts.items() if size)

    def advice(self) -> str:
        """The ways, in words; empty where there is none."""
        return ", or ".join(" and ".join(_WAYS[name] for name in names) for names in self.ways)


def remaining(
    store: Store,
    inventory: Inventory,
    size: int,
    limit: int,
    *,
    plan: Plan = NOTHING,
    profiles: Collection[bytes] = (),
    compacts: bool = True,
) -> Remains:
    """Take apart what a prune has left, or would leave.

    Parameters
    ----------
    inventory : of what is stored now.
    size, limit : bytes that the folder has afterwards, and may have.
    plan, profiles : what is still to go of the inventory.
    compacts : whether free pages are given back.

    Returns
    -------
    `pinned` : KV of chunks that are pinned.
    `text` : of documents.
    `chunks` : what is known of each chunk beside its KV: token ids, times, levels.
    `beginning` : KV of the prompt's own beginning, which every question reads.
    `profiles` : codec profiles that are in use.
    `beside` : index, vectors, marks and logs, in files of their own.
    `free` : free pages of the data file, where it was not to be compacted.
    `other` : of `size` bytes what is none of these: KV that stays, and the pages that find everything.
    """
    loose, gone = _going(plan, profiles)
    with store.snapshot() as snapshot:
        infos = {chunk: pages(length) for chunk, length in snapshot.sizes(tables.CHUNKS) if chunk not in loose}
        kept = {digest: pages(length) for digest, length in snapshot.sizes(tables.PROFILES) if digest not in gone}
    forgotten = set(plan.sources)
    documents = [document for document in inventory.documents if document.source not in forgotten]
    first = inventory.chunks.get(inventory.beginning)
    parts = {
        "pinned": sum(sum(each.levels.values()) for each in inventory.chunks.values() if each.pinned),
        "text": sum(document.size for document in documents),
        "chunks": sum(infos.values()),
        "beginning": sum(first.levels.values()) if first is not None and not first.pinned else 0,
        "profiles": sum(kept.values()),
        "beside": max(0, inventory.used - store.environment.file_bytes()),
        "free": 0 if compacts else inventory.free,
    }
    current = inventory.profile[0] if inventory.profile is not None and not store.is_front else b""

    def gives(names: Collection[str]) -> int:
        given = parts["free"] if "free" in names else 0
        if "pinned" in names:
            given += parts["pinned"] + kept.get(current, 0)  # which goes where no KV is left
        if "text" in names:
            given += _of_documents(documents, infos, "pinned" in names)
        return given

    ways = next(filter(None, (_enough(gives, count, size - limit) for count in range(1, len(_WAYS) + 1))), ())
    return Remains(parts | {"other": max(0, size - sum(parts.values()))}, ways)


def _enough(gives: Callable[[Collection[str]], int], count: int, short: int) -> tuple[tuple[str, ...], ...]:
    """Return the combinations of `count` measures that free at least `short` bytes."""
    return tuple(names for names in combinations(_WAYS, count) if gives(names) >= short)


def _of_documents(documents: Sequence[DocumentHolding], infos: Mapping[bytes, int], unpinned: bool) -> int:
    """Bytes that go when all documents are forgotten that are not pinned, or `unpinned` before."""
    going = [document for document in documents if unpinned or not document.pinned]
    staying = {chunk for document in documents if document.pinned and not unpinned for chunk in document.refs}
    chunks = {chunk for document in going for chunk in document.refs} - staying
    return sum(document.size for document in going) + sum(infos.get(chunk, 0) for chunk in chunks)


LOW_WATER = 0.9  # of the budget: what prune goes down to, so that it need not run again at once


@dataclass(frozen=True, slots=True)
class Budget:
    """Budget of a store and its use, in bytes.

    Attributes
    ----------
    budget : writes stop here; None: as much as the disk.
    low : `prune` reduces the store to this.
    """

    path: str
    budget: int | None
    low: int | None
    used: int
    disk_free: int

    def to_json(self) -> dict[str, Any]:
        """A JSON object, as `--json` shows it."""
        return {
            "path": self.path,
            "budget": self.budget,
            "goal": self.low,
            "folder_bytes": self.used,
            "disk_free": self.disk_free,
        }


def read_budget(store: Store) -> Budget:
    """The budget in force, and how much of it is used."""
    size = store.budget()
    low = None if size is None else low_water(size)
    return Budget(str(store.path), size, low, space.folder_bytes(store.path), space.disk_free(store.path))


def low_water(size: int) -> int:
    """Return the bytes that a prune to this budget aims at."""
    return int(size * LOW_WATER)


def budget_of(size: int | str | None) -> int | None:
    """A budget in bytes, from how people write it; `none` is None: no budget. Raises UsageError."""
    if isinstance(size, str):
        return None if size.strip().lower() == "none" else size_in_bytes(size)
    if size is not None and (type(size) is not int or size < 0):
        raise UsageError(f"{size} is not a size", "such as 500MB or 20GB")
    return size


def keep_budget(path: Path, size: int | str | None, *, lock_wait: float = 0.0) -> Budget:
    """Keep a budget in the store; None lifts it. A store that is larger stays so until it is pruned.

    Raises
    ------
    UsageError : that is no size.
    """
    wanted = budget_of(size)
    with Store.open(path) as store:
        with store.writer(lock_wait) as writer:
            writer.set_budget(wanted)
        return read_budget(store)
