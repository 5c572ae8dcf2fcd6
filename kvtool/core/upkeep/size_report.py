"""Size report of a store that is too large: its parts in bytes, the smallest plan, and what else would help."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.core.cache import space, tables
from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.store import Store
from kvtool.core.cache.tables import BY_CHUNK, name_key, split_record_key
from kvtool.core.common.sizes import shown_size, size_in_bytes
from kvtool.core.errors import DamagedError, UsageError
from kvtool.core.upkeep.inventory import Inventory, pages
from kvtool.core.upkeep.plan import NOTHING, Plan

LOW_WATER = 0.9  # of the budget: the goal of a prune, so that it need not run again at once
_PARTS = {
    "pinned": "pinned",
    "text": "of text",
    "chunks": "known of chunks besides their KV",
    "beginning": "of KV of the prompt's own beginning",
    "profiles": "of the codec's profile",
    "beside": "of index and logs",
    "free": "free in the file",
    "other": "of other KV and of what finds it",
}


def left_by(store: Store, inventory: Inventory, plan: Plan, profiles: Collection[bytes]) -> int:
    """Bytes of the folder's files once a plan is carried out and the store compacted, at most; closer than the plan's
    own sum, which leaves out the tree pages of what is dropped.

    Parameters
    ----------
    profiles : digests of those that are dropped in addition to the plan's own.
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
    """Return the chunks of which everything is dropped, and the profiles that are, `profiles` among them."""
    loose = frozenset(chunk for step in plan.steps for chunk in step.loose)
    return loose, frozenset(profiles).union(*(step.profiles for step in plan.steps))


def parts_in_words(parts: Mapping[str, int]) -> str:
    """Return the parts of a store (see :func:`remaining`) in words."""
    return ", ".join(f"{shown_size(size)} {_PARTS[part]}" for part, size in parts.items() if size)


def remaining(
    store: Store,
    inventory: Inventory,
    size: int,
    *,
    plan: Plan = NOTHING,
    profiles: Collection[bytes] = (),
    compacts: bool = True,
) -> dict[str, int]:
    """Measure the parts of what a prune has left, or would leave.

    Parameters
    ----------
    inventory : of what is stored now.
    size : bytes that the folder has afterwards.
    plan, profiles : what is still to go of the inventory.
    compacts : whether free pages are given back.

    Returns
    -------
    `pinned` : KV of chunks that are pinned.
    `text` : of documents.
    `chunks` : what is stored of each chunk besides its KV: token ids, times, levels.
    `beginning` : KV of the prompt's own beginning, which every question reads.
    `profiles` : codec profiles that are in use.
    `beside` : index, vectors, marks and logs, in files of their own.
    `free` : free pages of the data file, where it was not to be compacted.
    `other` : of `size` bytes what is none of these: KV that stays, and the pages that find everything.
    """
    loose, gone = _going(plan, profiles)
    with store.snapshot() as snapshot:
        infos = sum(pages(length) for chunk, length in snapshot.sizes(tables.CHUNKS) if chunk not in loose)
        kept = sum(pages(length) for digest, length in snapshot.sizes(tables.PROFILES) if digest not in gone)
    forgotten = set(plan.sources)
    first = inventory.chunks.get(inventory.beginning)
    parts = {
        "pinned": sum(sum(each.levels.values()) for each in inventory.chunks.values() if each.pinned),
        "text": sum(document.size for document in inventory.documents if document.source not in forgotten),
        "chunks": infos,
        "beginning": sum(first.levels.values()) if first is not None and not first.pinned else 0,
        "profiles": kept,
        "beside": max(0, inventory.used - store.environment.file_bytes()),
        "free": 0 if compacts else inventory.free,
    }
    return parts | {"other": max(0, size - sum(parts.values()))}


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
