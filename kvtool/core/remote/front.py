"""The size of a store in front of a tier: it has a budget, and what was not asked for longest gives way."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from kvtool.core.cache import space
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import known
from kvtool.core.errors import NoSpaceError
from kvtool.core.upkeep.budget import LOW_WATER
from kvtool.core.upkeep.inventory import kept_always, pages, pinned_with_documents

MOST_BYTES = 20 * 10**9
_ROW = 256
_SLACK = 2**20  # tree pages, locks and what else a commit touches


def default_budget(path: Path) -> int:
    """20 GB, or half of the disk that is left where that is less; never less than what is there already."""
    used = space.folder_bytes(path)
    return max(used, min(MOST_BYTES, used + space.disk_free(path) // 2))


def make_room(store: Store, writer: Writer, need: int) -> None:
    """Let `need` bytes find room in the store's budget: KV goes, that of the least recently used chunks first.

    Everything that goes can be fetched again. Pinned documents and chunks, and the prompt's own beginning, stay.
    """
    budget = store.budget()
    if budget is None:
        return
    lacking = need + _SLACK - _room(store, budget)
    if lacking <= 0:
        return
    lacking += int(budget * (1 - LOW_WATER))  # so that it need not be done again at once
    doomed: dict[str, list[bytes]] = {}
    for chunk_id in _oldest_first(store):
        if lacking <= 0:
            break
        for level, size in store.sizes_here(chunk_id).items():
            doomed.setdefault(level, []).append(chunk_id)
            lacking -= size
    for level in known(doomed):  # the finer first: none is ever there without what it refines
        writer.drop_level(doomed[level], level)
    if space.folder_bytes(store.path) > budget:  # it was lowered; free pages of a file can be reused, not left out
        with suppress(NoSpaceError):
            writer.compact()


def bytes_of(record: bytes) -> int:
    """What a record takes of the disk, with its share of the tree."""
    return pages(len(record)) + _ROW


def _room(store: Store, budget: int) -> int:
    return budget - space.folder_bytes(store.path) + store.environment.free_bytes()


def _oldest_first(store: Store) -> list[bytes]:
    used, added, kept = store.last_used(), store.added(), kept_always(store) | pinned_with_documents(store)
    known = [chunk_id for chunk_id in store.chunk_ids() if chunk_id not in kept]
    return sorted(known, key=lambda chunk_id: (used.get(chunk_id, added.get(chunk_id, 0)), chunk_id))
