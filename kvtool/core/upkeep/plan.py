"""Eviction plan: the levels, chunks and documents to drop, as a pure function of what a store holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtool.core.codec.levels import exact, known, lossy, profiled
from kvtool.core.errors import UsageError
from kvtool.core.upkeep.inventory import ChunkHolding, DocumentHolding, Inventory

UNFINISHED = "unfinished"  # the step that drops what interrupted ingests have stored
Drop = tuple[bytes, str]  # chunk, level
Ladder = Callable[[Mapping[str, int], frozenset[str]], list[str]]  # a chunk's levels, those measured -> those to drop


@dataclass(slots=True)
class Step:
    """Step of a plan, which drops one kind of thing; it is put together a document at a time.

    Attributes
    ----------
    name : `unreferenced`, `unfinished`, `stretches`, `cold`, `exact`, `level N`, `kv`, `profile`, `documents`.
    drops : levels of chunks.
    sources : documents that are forgotten whole.
    loose : chunks without a reference, or without one then, of which everything is dropped.
    stretches : of answered prompts.
    profiles : of the codec, by digest.
    size : bytes that the step gives back once the store is compacted.
    """

    name: str
    drops: list[Drop] = field(default_factory=list, repr=False)  # raw ids, which nobody can read
    sources: list[str] = field(default_factory=list)
    loose: list[bytes] = field(default_factory=list, repr=False)
    size: int = 0
    stretches: list[bytes] = field(default_factory=list, repr=False)
    profiles: list[bytes] = field(default_factory=list, repr=False)

    @property
    def is_empty(self) -> bool:
        """Return True if the step drops nothing."""
        return not (self.drops or self.sources or self.loose or self.stretches or self.profiles)

    @property
    def chunks(self) -> int:
        """Return the number of chunks that the step touches."""
        return len({chunk for chunk, _ in self.drops} | set(self.loose))

    def to_json(self) -> dict[str, Any]:
        """A JSON object, as `--json` shows it."""
        return {
            "step": self.name,
            "chunks": self.chunks,
            "chunk_levels": len(self.drops),
            "documents": len(self.sources),
            "stretches": len(self.stretches),
            "bytes": self.size,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in their order.

    Attributes
    ----------
    expected : bytes of the folder afterwards, at most, once it is compacted.
    goal : bytes that were asked for; None: no size was.
    refusal : of a dry run: why it would not be done as it was asked for; None: it would.
    """

    steps: tuple[Step, ...]
    expected: int
    goal: int | None = None
    refusal: UsageError | None = field(default=None, compare=False)

    @property
    def reaches(self) -> bool:
        """Return True if the plan meets the goal."""
        return self.goal is None or self.expected <= self.goal

    @property
    def sources(self) -> tuple[str, ...]:
        """Documents that are forgotten."""
        return tuple(source for step in self.steps for source in step.sources)

    @property
    def size(self) -> int:
        """Bytes that all steps give back."""
        return sum(step.size for step in self.steps)


NOTHING = Plan((), 0)


@dataclass(frozen=True, slots=True)
class PruneRequest:
    """A request to prune; times are seconds since 1970.

    Attributes
    ----------
    goal : bytes that the folder is to have; None: no size.
    cold_before : chunks not used since then keep only their coarsest measured level.
    unused_before, added_before : documents not used, or not changed, since then are forgotten whole.
    as_needed : those are forgotten last, and only until the goal is met; else all of them, first.
    fetched : all KV can be fetched again, so that none is kept at a coarser level.
    """

    goal: int | None = None
    cold_before: float | None = None
    unused_before: float | None = None
    added_before: float | None = None
    as_needed: bool = False
    fetched: bool = False

    @property
    def whatever_the_size(self) -> bool:
        """Return True if the request asks for something that does not depend on the goal."""
        ages = self.unused_before is not None or self.added_before is not None
        return self.cold_before is not None or (ages and not self.as_needed)

    def forgets(self, document: DocumentHolding) -> bool:
        """Return True if a document may be forgotten."""
        unused = self.unused_before is not None and document.used < self.unused_before
        old = self.added_before is not None and document.added < self.added_before
        return not document.pinned and (unused or old)


def plan_prune(inventory: Inventory, wanted: PruneRequest) -> Plan:
    """Plan the steps in their order, the least used first within each, and no step beyond the goal.

    Chunks without a reference are dropped first, then documents that are to be removed whatever the size, then what
    interrupted ingests have stored of files, if the goal needs it, then states of answered prompts (unused, or
    needed for the goal), then the fine levels of unused chunks. The rest is dropped only as far as the goal needs it:
    exact records of chunks that have a level with a measured loss, finer levels before coarser, all KV of chunks whose
    text stays, the codec's profile if no KV is left, and last the documents that may be removed. The local cache of a
    shared store drops all of a chunk's KV at once: a coarse level that is left there saves less fetching than the KV of
    a chunk that is asked for more often (samples/results/streaming.md). It keeps its profile, which the next fetched
    record names.
    """
    return Planner(inventory, wanted).plan()


class Planner:
    """Takes steps, and counts what is expected to be left after each."""

    def __init__(self, inventory: Inventory, wanted: PruneRequest) -> None:
        self.inventory, self.wanted = inventory, wanted
        self.left = {chunk: dict(held.levels) for chunk, held in inventory.chunks.items()}
        self.expected = inventory.used - inventory.free
        self.gone: set[str] = set()
        self.referring = Counter(chunk for document in inventory.documents for chunk in document.refs)
        self.referring.update(inventory.shared)

    def plan(self) -> Plan:
        steps = [step for step in self._steps() if not step.is_empty]
        return Plan(tuple(steps), self.expected, self.wanted.goal)

    def _steps(self) -> Iterator[Step]:
        yield self._unreferenced()
        if not self.wanted.as_needed:
            yield self.documents(self.wanted.forgets)
        yield self._unfinished()
        yield self._stretches()
        if self.wanted.cold_before is not None:
            yield self._cold(self.wanted.cold_before)
        if self.wanted.goal is not None:
            in_turn = [] if self._enough else sorted(self._of_documents(), key=lambda row: row[1].turn)
            stored = {level for _, held in in_turn for level in held.levels}
            if not self.wanted.fetched:
                yield self._levels("exact", _exact, in_turn)
                for level in lossy(stored)[:-1]:
                    yield self._levels(f"level {level}", _finer(level), in_turn)
            yield self._levels("kv", lambda levels, measured: list(levels), in_turn)
            if not self.wanted.fetched:
                yield self._profile()
            if self.wanted.as_needed:
                yield self.documents(self.wanted.forgets)

    @property
    def _enough(self) -> bool:
        return self.wanted.goal is None or self.expected <= self.wanted.goal

    # ---- steps ----

    def _unreferenced(self) -> Step:
        return self._loose("unreferenced", self.inventory.loose)

    def _unfinished(self) -> Step:
        """Drop what interrupted ingests have stored of files: only such an ingest computes it again."""
        return self._loose(UNFINISHED, () if self._enough else self.inventory.unfinished)

    def _loose(self, name: str, chunks: Sequence[bytes]) -> Step:
        step = Step(name, loose=list(chunks))
        for chunk in chunks:
            self._take(step, chunk, list(self.left[chunk]))
        return step

    def _stretches(self) -> Step:
        """Drop the computed parts of answered prompts: a question computes them again, and no text is lost."""
        step = Step("stretches")
        for stretch, used, size in self.inventory.stretches:
            cold = self.wanted.cold_before is not None and used < self.wanted.cold_before
            if cold or not self._enough:
                step.stretches.append(stretch)
                self._free(step, size)
        return step

    def _cold(self, before: float) -> Step:
        step = Step("cold")
        for chunk, held in self._of_documents():
            if held.used < before and held.measured:
                self._take(step, chunk, _finer_than_coarsest(self.left[chunk], held.measured))
        return step

    def _levels(self, name: str, ladder: Ladder, in_turn: Sequence[tuple[bytes, ChunkHolding]]) -> Step:
        step = Step(name)
        for chunk, held in in_turn:
            if self._enough:
                break
            self._take(step, chunk, ladder(self.left[chunk], held.measured))
        return step

    def _profile(self) -> Step:
        """The codec's, where no record is left that names it, and none that could be made smaller with it."""
        step = Step("profile")
        profile = self.inventory.profile
        if profile is not None and not self._enough and not any(map(self._needs_profile, self.left)):
            step.profiles.append(profile[0])
            self._free(step, profile[1])
        return step

    def _needs_profile(self, chunk: bytes) -> bool:
        """The prompt's own beginning is never compressed."""
        levels = self.left[chunk]
        return bool(profiled(levels) if chunk == self.inventory.beginning else levels)

    def documents(self, forgets: Callable[[DocumentHolding], bool]) -> Step:
        """Remove documents, the least used first, with the chunks that no document refers to then."""
        step = Step("documents")
        for document in self.inventory.documents:
            if self.wanted.as_needed and self._enough:
                break
            if forgets(document):
                step.sources.append(document.source)
                self.gone.add(document.source)
                self._free(step, document.size)
                self.referring.subtract(document.refs)
                loose = [chunk for chunk in document.refs if not self.referring[chunk]]
                step.loose += loose
                for chunk in loose:
                    self._take(step, chunk, list(self.left.get(chunk, ())))
        return step

    # ---- helpers ----

    def _of_documents(self) -> Iterator[tuple[bytes, ChunkHolding]]:
        """Chunks that may be touched, in the order of their documents."""
        for document in self.inventory.documents:
            for chunk in document.chunks if document.source not in self.gone else ():
                held = self.inventory.chunks.get(chunk)
                if held is not None and not held.pinned:
                    yield chunk, held

    def _take(self, step: Step, chunk: bytes, levels: list[str]) -> None:
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
        standing = lossy({level, *measured.intersection(levels)})
        return [level] if level in levels and level != standing[-1] else []

    return ladder


def _finer_than_coarsest(levels: Mapping[str, int], measured: frozenset[str]) -> list[str]:
    """All but the coarsest measured level, and what is coarser still: that one may refine it."""
    standing, stored = lossy(measured.intersection(levels)), known(levels)
    return stored[: stored.index(standing[-1])] if standing else []
