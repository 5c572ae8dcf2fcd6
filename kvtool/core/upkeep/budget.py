from __future__ import annotations

from pathlib import Path

from kvtool.core.cache.store import Store
from kvtool.core.common.sizes import size_in_bytes
from kvtool.core.errors import UsageError

LOW_WATER = 0.9  # of the budget: the goal of a prune, so that it need not run again at once


def budget_of(size: int | str | None) -> int | None:
    """Parse a size; `none` is None: no budget. Raises UsageError."""
    if isinstance(size, str):
        return None if size.strip().lower() == "none" else size_in_bytes(size)
    if size is not None and (type(size) is not int or size < 0):
        raise UsageError(f"{size} is not a size", "such as 500MB or 20GB")
    return size


def keep_budget(path: Path, size: int | str | None, *, lock_wait: float = 0.0) -> None:
    """Keep a budget in the store; None lifts it. A larger store stays so until it is pruned. Raises UsageError."""
    budget = budget_of(size)
    with Store.open(path) as store, store.writer(lock_wait) as writer:
        writer.set_budget(budget)
