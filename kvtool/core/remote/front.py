"""The size of a store in front of a tier: it has a budget, and what is coldest gives way, as `store prune` has it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from kvtool.core.cache import space
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import known
from kvtool.core.errors import NoSpaceError
from kvtool.core.upkeep.inventory import eviction_order, kept_always, pages, pinned_with_documents
from kvtool.core.upkeep.size_report import LOW_WATER

MOST_BYTES = 20 * 10**9
_ROW = 256
_SLACK = 3 * 2**19  # tree pages, locks, notes of use until they are folded, and what else a commit touches


def default_budget(path: Path) -> int:
    """20 GB, or half of the disk that is left where that is less; never less than what is there already."""
    used = space.folder_bytes(path)
    return max(used, min(MOST_BYTES, used + space.disk_free(path) // 2))


def make_room(store: Store, writer: Writer, coming: Mapping[bytes, int], spare: float = 1 - LOW_WATER) -> set[bytes]:
    """Let chunks find room in the store's budget: KV goes, of the coldest first, and of none as warm as what comes.

    Everything that goes can be fetched again. Pinned documents and chunks, and the prompt's own beginning, stay. So
    what is too much for the budget at once leaves what is there alone, instead of driving itself out.

    Parameters
    ----------
    coming : bytes by chunk.
    spare : share of the budget that is left free besides, where chunks have to go, so that it need not be done again at
        once; only of what is colder than all that comes.

    Returns
    -------
    Those of the chunks that there is room for.
    """
    planned = plan_room(store, coming, None, spare)
    for level in known(planned.going):  # the finer first: none is ever there without what it refines
        writer.drop_level(planned.going[level], level)
    budget = store.budget()
    if budget is not None and space.folder_bytes(store.path) > budget:  # it was lowered: free pages are not left out
        with suppress(NoSpaceError):
            writer.compact()
    return planned.kept


@dataclass(frozen=True, slots=True)
class Room:
    """A plan of an eviction: the incoming chunks that are stored, and the stored ones that are evicted, by level."""

    kept: set[bytes]
    going: Mapping[str, list[bytes]]


def plan_room(
    store: Store, coming: Mapping[bytes, int], order: Mapping[bytes, float] | None = None, spare: float = 1 - LOW_WATER
) -> Room:
    """Plan the eviction of :func:`make_room`; evict by `order`, if given, instead of the store's own scores of use."""
    budget = store.budget()
    if budget is None or sum(coming.values()) <= _room(store, budget):
        return Room({*coming}, {})
    leaving = _Leaving(store, eviction_order(store) if order is None else order, {*coming}, _room(store, budget))
    leaving.until(0)  # a budget that was lowered is met, whatever comes
    kept = set[bytes]()
    for chunk_id in sorted(coming, key=lambda chunk_id: (-leaving.turn(chunk_id), chunk_id)):
        leaving.until(coming[chunk_id], colder_than=leaving.turn(chunk_id))
        if coming[chunk_id] <= leaving.room:
            kept.add(chunk_id)
            leaving.room -= coming[chunk_id]
    leaving.until(int(budget * spare), colder_than=min(map(leaving.turn, coming)))
    return Room(kept, leaving.going)


def give_way(store: Store, writer: Writer) -> bool:
    """Drop the KV of the coldest chunks, a tenth of what may be here. False: there is none."""
    leaving = _Leaving(store, eviction_order(store), set(), room=0)
    leaving.until(max(1, int((store.budget() or space.folder_bytes(store.path)) * (1 - LOW_WATER))))
    for level in known(leaving.going):
        writer.drop_level(leaving.going[level], level)
    return bool(leaving.going)


def room_beside(store: Store, writer: Writer, size: int) -> None:
    """Let files of so many bytes find room in the store's folder: the data file shrinks as far as KV may go."""
    budget = store.budget()
    while budget is not None and space.folder_bytes(store.path) + size > budget and give_way(store, writer):
        with suppress(NoSpaceError):
            writer.compact()


def bytes_of(record: int) -> int:
    """Return the bytes on disk that a record of this many bytes needs, with its share of the B-tree."""
    return pages(record) + _ROW


class _Leaving:
    """Chunks that may go, the coldest first, and what is free once those before have gone."""

    def __init__(self, store: Store, order: Mapping[bytes, float], stay: set[bytes], room: int) -> None:
        self._store, self._turns, self.room = store, order, room
        self.going: dict[str, list[bytes]] = {}
        stay |= kept_always(store) | pinned_with_documents(store)
        may_go = (chunk_id for chunk_id in store.ids_here() if chunk_id not in stay)
        self._order = iter(sorted(may_go, key=lambda chunk_id: (self.turn(chunk_id), chunk_id)))

    def turn(self, chunk_id: bytes) -> float:
        return self._turns.get(chunk_id, 0.0)

    def until(self, room: int, colder_than: float | None = None) -> None:
        """Let chunks go until so much is free."""
        while self.room < room and (chunk_id := next(self._order, None)) is not None:
            if colder_than is not None and self.turn(chunk_id) >= colder_than:
                self._order = chain([chunk_id], self._order)
                return
            for level, size in self._store.sizes_here(chunk_id).items():
                self.going.setdefault(level, []).append(chunk_id)
                self.room += size


def _room(store: Store, budget: int) -> int:
    return budget - space.folder_bytes(store.path) + store.environment.free_bytes() - _SLACK
