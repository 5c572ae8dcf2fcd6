"""Inventory of a store, and the eviction plan: what to drop, as a pure function of what the store holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtool.core.codec.levels import exact, known, lossy, profiled
from kvtool.core.upkeep.inventory import ChunkHolding, DocumentHolding, Inventory

UNFINISHED, PROFILE = "unfinished", "profile"  # names of steps
Drop = tuple[bytes, str]  # chunk, level
Ladder = Callable[[Mapping[str, int], frozenset[str]], list[str]]  # a chunk's levels, those measured -> those to drop


@dataclass(slots=True)
class Step:
    name: str  # `unreferenced`, `unfinished`, `checkpoints`, `cold`, `exact`, `level N`, `kv`, `profile`, `documents`
    drops: list[Drop] = field(default_factory=list, repr=False)  # raw ids, which nobody can read
    sources: list[str] = field(default_factory=list)  # documents that are forgotten whole
    loose: list[bytes] = field(default_factory=list, repr=False)  # without a reference
    size: int = 0  # bytes that the step gives back once the store is compacted
    stretches: list[bytes] = field(default_factory=list, repr=False)  # of answered prompts
    profiles: list[bytes] = field(default_factory=list, repr=False)  # of the codec, by digest

    @property
    def is_empty(self) -> bool:
        return not (self.drops or self.sources or self.loose or self.stretches or self.profiles)

    @property
    def chunks(self) -> int:
        return len({chunk for chunk, _ in self.drops} | set(self.loose))

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.name,
            "chunks": self.chunks,
            "chunk_levels": len(self.drops),
            "documents": len(self.sources),
            "checkpoints": len(self.stretches),
            "bytes": self.size,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in their order; `expected`: bytes of the folder afterwards, at most, once it is compacted."""

    steps: tuple[Step, ...]
    expected: int

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(source for step in self.steps for source in step.sources)


@dataclass(frozen=True, slots=True)
class PruneRequest:
    """A request to prune; times are seconds since 1970."""

    goal: int | None = None  # bytes that the folder is to have; None: no size
    cold_before: float | None = None  # chunks not used since then keep only their coarsest measured level
    unused_before: float | None = None  # documents not used, or not changed, since then are forgotten whole
    added_before: float | None = None
    as_needed: bool = False  # those are forgotten last, and only until the goal is met; else all of them, first
    fetched: bool = False  # all KV can be fetched again, so that none is kept at a coarser level

    @property
    def whatever_the_size(self) -> bool:
        ages = self.unused_before is not None or self.added_before is not None
        return self.cold_before is not None or (ages and not self.as_needed)

    def forgets(self, document: DocumentHolding) -> bool:
        unused = self.unused_before is not None and document.used < self.unused_before
        old = self.added_before is not None and document.added < self.added_before
        return not document.pinned and (unused or old)


def plan_prune(inventory: Inventory, request: PruneRequest) -> Plan:
    """Plan the steps of `kvtool help upkeep` up to the goal, the least recently used chunks first within each.

    The local cache of a shared store drops all of a chunk's KV at once: a coarse level that is left there saves less
    fetching than the KV of a chunk that is used more often (samples/results/streaming.md). It keeps its profile, which
    the next fetched record names.
    """
    planner = _Planner(inventory, request.goal)
    planner.drop_unreferenced()
    if not request.as_needed:
        planner.drop_documents(request.forgets)
    if not planner.is_enough:  # only the interrupted ingest computes these again
        planner.drop_chunks(UNFINISHED, inventory.unfinished)
    planner.drop_stretches(request.cold_before or 0)
    if request.cold_before is not None:
        planner.drop_cold(request.cold_before)
    if not planner.is_enough:
        planner.drop_kv(whole=request.fetched)
        if request.as_needed:
            planner.drop_documents(request.forgets, as_needed=True)
    return planner.plan()


class _Planner:
    def __init__(self, inventory: Inventory, goal: int | None) -> None:
        self.inventory, self.goal = inventory, goal
        self.steps: list[Step] = []
        self.left = {chunk: dict(held.levels) for chunk, held in inventory.chunks.items()}
        self.expected = inventory.used - inventory.free
        self.referring = Counter(chunk for document in inventory.documents for chunk in document.refs)

    def plan(self) -> Plan:
        return Plan(tuple(step for step in self.steps if not step.is_empty), self.expected)

    @property
    def is_enough(self) -> bool:
        return self.goal is None or self.expected <= self.goal

    def drop_unreferenced(self) -> None:
        step = self.drop_chunks("unreferenced", self.inventory.loose)
        for digest, size in self.inventory.old_profiles:
            self._drop_profile_in(step, digest, size)

    def drop_chunks(self, name: str, chunks: Sequence[bytes]) -> Step:
        step = self._begin(name)
        step.loose += chunks
        for chunk in chunks:
            self._drop_levels(step, chunk, list(self.left[chunk]))
        return step

    def drop_stretches(self, cold_before: float) -> None:
        """Drop the computed parts of answered prompts: a question computes them again, and no text is lost."""
        step = self._begin("checkpoints")
        for stretch, used, size in self.inventory.stretches:
            if used < cold_before or not self.is_enough:
                step.stretches.append(stretch)
                self._free(step, size)

    def drop_cold(self, before: float) -> None:
        step = self._begin("cold")
        for held in self._evictable():
            if held.used < before and held.measured:
                self._drop_levels(step, held.chunk_id, _finer_than_coarsest(self.left[held.chunk_id], held.measured))

    def drop_kv(self, whole: bool) -> None:
        """Drop levels of chunks, exact ones first, until it is enough; `whole`: all of a chunk at once."""
        chunks = sorted(self._evictable(), key=lambda held: held.turn)
        ladders: dict[str, Ladder] = {}
        if not whole:
            stored = {level for held in chunks for level in held.levels}
            ladders = {"exact": _exact} | {f"level {level}": _finer(level) for level in lossy(stored)[:-1]}
        ladders["kv"] = lambda levels, measured: list(levels)
        for name, ladder in ladders.items():
            step = self._begin(name)
            for held in chunks:
                if self.is_enough:
                    return
                self._drop_levels(step, held.chunk_id, ladder(self.left[held.chunk_id], held.measured))
        if not whole and not self.is_enough:
            self._drop_profile()

    def _drop_profile(self) -> None:
        profile = self.inventory.profile
        if profile is not None and not any(map(self._needs_profile, self.left)):
            self._drop_profile_in(self._begin(PROFILE), *profile)

    def _needs_profile(self, chunk: bytes) -> bool:
        """The prompt's own beginning is never compressed."""
        levels = self.left[chunk]
        return bool(profiled(levels) if chunk == self.inventory.beginning else levels)

    def drop_documents(self, forgets: Callable[[DocumentHolding], bool], as_needed: bool = False) -> None:
        step = self._begin("documents")
        for document in filter(forgets, self.inventory.documents):
            if as_needed and self.is_enough:
                break
            step.sources.append(document.source)
            self._free(step, document.size)
            self.referring.subtract(document.refs)
            loose = [chunk for chunk in document.refs if not self.referring[chunk]]
            step.loose += loose
            for chunk in loose:
                self._drop_levels(step, chunk, list(self.left.get(chunk, ())))

    def _evictable(self) -> list[ChunkHolding]:
        refs = dict.fromkeys(chunk for document in self.inventory.documents for chunk in document.refs)
        held = (self.inventory.chunks.get(chunk) for chunk in refs if self.referring[chunk])
        return [each for each in held if each is not None and not each.pinned]

    def _begin(self, name: str) -> Step:
        self.steps.append(Step(name))
        return self.steps[-1]

    def _drop_profile_in(self, step: Step, digest: bytes, size: int) -> None:
        step.profiles.append(digest)
        self._free(step, size)

    def _drop_levels(self, step: Step, chunk: bytes, levels: list[str]) -> None:
        for level in levels:
            self._free(step, self.left[chunk].pop(level))
            step.drops.append((chunk, level))

    def _free(self, step: Step, size: int) -> None:
        step.size += size
        self.expected -= size


def _exact(levels: Mapping[str, int], measured: frozenset[str]) -> list[str]:
    """Return the exact records of a chunk that has a level with a measured loss; else the larger of two exact ones."""
    lossless = exact(levels)
    return lossless if measured.intersection(levels) else lossless[:-1]


def _finer(level: str) -> Ladder:
    """Drop this level of chunks that have a coarser one with a measured loss; a coarser one never refines a finer."""

    def ladder(levels: Mapping[str, int], measured: frozenset[str]) -> list[str]:
        usable = lossy({level, *measured.intersection(levels)})
        return [level] if level in levels and level != usable[-1] else []

    return ladder


def _finer_than_coarsest(levels: Mapping[str, int], measured: frozenset[str]) -> list[str]:
    """All but the coarsest measured level, and what is coarser still: that one may refine it."""
    usable, stored = lossy(measured.intersection(levels)), known(levels)
    return stored[: stored.index(usable[-1])] if usable else []
