from __future__ import annotations

from dataclasses import dataclass

from kvtool.core.cache.options import LockOptions, max_size_option
from kvtool.core.options.option import Options, option

WHICH, LISTED = "Selection", "List"  # headings in the commands' help


@dataclass(frozen=True, kw_only=True)
class ListOptions(Options, settings=False, group=LISTED):
    chunks: bool = option(False, "List chunks instead of documents.")


@dataclass(frozen=True, kw_only=True)
class ForgetOptions(LockOptions, settings=False, group=WHICH):
    dry_run: bool = option(False, "Show what would be removed, and do nothing.")
    yes: bool = option(False, "Allow the removal of more than half.")


@dataclass(frozen=True, kw_only=True)
class PruneOptions(ForgetOptions, settings=False, group=WHICH):
    """Sizes are in bytes, ages in seconds. `max_size` None: the store's budget. `compact` gives free pages back."""

    max_size: int | None = max_size_option("Prune to this size.", "the budget", WHICH)
    max_age: float | None = option(
        None,
        "Remove documents not changed for this long.",
        synonyms=("--older-than",),
        unit="duration",
        lowest=0,
    )
    unused: float | None = option(None, "Remove documents not used for this long.", unit="duration", lowest=0)
    cold: float | None = option(
        None, "Keep only the smallest level of chunks not used for this long.", unit="duration", lowest=0
    )
    compact: bool = option(True, "Shrink the store's files to meet the size.", flag="--compact/--no-compact")
