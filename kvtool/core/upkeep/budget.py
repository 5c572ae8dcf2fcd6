from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.core.cache import space
from kvtool.core.cache.store import Store
from kvtool.core.common.sizes import size_in_bytes
from kvtool.core.errors import UsageError

LOW_WATER = 0.9  # of the budget: the goal of a prune, so that it need not run again at once


@dataclass(frozen=True, slots=True)
class Budget:
    """In bytes. Writes stop at `budget` (None: as much as the disk has), and `prune` aims at `low`."""

    path: str
    budget: int | None
    low: int | None
    used: int
    disk_free: int

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "budget": self.budget,
            "target_bytes": self.low,
            "folder_bytes": self.used,
            "disk_free": self.disk_free,
        }


def read_budget(store: Store) -> Budget:
    size = store.budget()
    low = None if size is None else low_water(size)
    return Budget(str(store.path), size, low, space.folder_bytes(store.path), space.disk_free(store.path))


def low_water(size: int) -> int:
    return int(size * LOW_WATER)


def budget_of(size: int | str | None) -> int | None:
    """Parse a size; `none` is None: no budget. Raises UsageError."""
    if isinstance(size, str):
        return None if size.strip().lower() == "none" else size_in_bytes(size)
    if size is not None and (type(size) is not int or size < 0):
        raise UsageError(f"{size} is not a size", "such as 500MB or 20GB")
    return size


def keep_budget(path: Path, size: int | str | None, *, lock_wait: float = 0.0) -> Budget:
    """Keep a budget in the store; None lifts it. A larger store stays so until it is pruned. Raises UsageError."""
    wanted = budget_of(size)
    with Store.open(path) as store:
        with store.writer(lock_wait) as writer:
            writer.set_budget(wanted)
        return read_budget(store)
