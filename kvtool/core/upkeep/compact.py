"""A store without free pages and without what nothing names: a new generation, switched to while readers go on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.core.cache import space
from kvtool.core.cache.store import Store
from kvtool.core.upkeep.inventory import kept_always
from kvtool.core.upkeep.profiles import old_profiles


@dataclass(frozen=True, slots=True)
class Compacted:
    """Bytes of the folder before and after; chunks that nobody referred to and profiles that nothing named, dropped."""

    before: int
    after: int
    chunks: int = 0
    profiles: int = 0

    def to_json(self) -> dict[str, Any]:
        """A JSON object, as `--json` shows it."""
        return {
            "bytes_before": self.before,
            "bytes_after": self.after,
            "bytes_freed": self.before - self.after,
            "chunks": self.chunks,
            "profiles": self.profiles,
        }


def compact(path: Path, *, lock_wait: float = 0.0) -> Compacted:
    """Drop what nothing refers to, and give free pages back to the disk.

    The second copy is not counted against the size budget: it is gone, or the first one is, before anything else is
    written. The disk has to have room for it.

    Raises
    ------
    NoSpaceError : it has not; what nothing refers to is dropped all the same.
    """
    with Store.open(path) as store, store.writer(lock_wait) as writer:
        before = space.folder_bytes(store.path)
        chunks = writer.collect(keep=kept_always(store))
        profiles = writer.drop_profiles(old_profiles(store))
        writer.compact()
        return Compacted(before, space.folder_bytes(store.path), chunks, profiles)
