"""Inventory of a store, and the eviction plan: what to drop, as a pure function of what the store holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvtool.core.cache import layout, tables
from kvtool.core.cache.environment import PAGE_BYTES
from kvtool.core.cache.identity import ID_BYTES
from kvtool.core.cache.store import Store
from kvtool.core.cache.tables import in_turn
from kvtool.core.cache.tree import Snapshot
from kvtool.core.codec.levels import exact, known, lossy, profiled
from kvtool.core.common.text import level_rows
from kvtool.core.errors import DamagedError
from kvtool.core.session.due import due
from kvtool.core.session.identity import MeasuredLosses, StoreIdentity

_NODE = 64  # bytes of a row besides its value: node, key, offset
_PAGE_HEADER = 16
_OWN_PAGES_FROM = PAGE_BYTES // 2  # longer values have pages of their own, which go with them


@dataclass(frozen=True, slots=True)
class ChunkHolding:
    chunk_id: bytes
    levels: Mapping[str, int]  # bytes that dropping each level frees
    used: int = 0  # seconds of its last use; when it came, where it was never used
    pinned: bool = False  # nothing of it may be dropped
    measured: frozenset[str] = frozenset()  # its lossy levels of which the loss is known
    warmth: float = 0.0  # how lately and how often it was used (`cache/access_log.py`)

    @property
    def turn(self) -> float:
        """Return the place in the eviction order: lower is evicted first. Being added counts as a use."""
        return max(self.used, self.warmth)


@dataclass(frozen=True, slots=True)
class DocumentHolding:
    source: str
    used: int  # seconds, of the chunk that was used or that came last
    added: int
    pinned: bool
    refs: tuple[bytes, ...]  # the chunks that it refers to
    size: int = 0  # bytes that are dropped with it besides KV


@dataclass(frozen=True, slots=True)
class Inventory:
    documents: tuple[DocumentHolding, ...]  # the least used first, by the most used of its chunks
    chunks: Mapping[bytes, ChunkHolding]
    loose: tuple[bytes, ...]  # chunks that no document refers to, but for the prompt's own beginning
    used: int  # bytes of the folder's files
    free: int  # bytes of them that a compaction would free now
    stretches: tuple[tuple[bytes, int, int], ...] = ()  # id, seconds of last use, bytes; in eviction order
    beginning: bytes = b""  # the chunk before every prompt's first, which stays
    profile: tuple[bytes, int] | None = None  # digest and bytes of the codec's current profile; None: none is stored
    old_profiles: tuple[tuple[bytes, int], ...] = ()  # of the profiles that no record names any more


def take_inventory(store: Store) -> Inventory:
    """Read what a plan needs to know; no KV is read. Raises DamagedError."""
    with store.snapshot() as snapshot:
        sizes: dict[bytes, dict[str, int]] = {chunk: {} for chunk in snapshot.keys(tables.CHUNKS)}
        sizes |= _level_sizes(snapshot)
        texts = {key: pages(size) for key, size in snapshot.sizes(tables.DOCUMENTS)}
        free = max(0, store.environment.allocated_bytes() - snapshot.live_bytes())
    refs = {document.source: [ref.chunk_id for ref in document.chunks] for document in store.documents()}
    used, warm, added = store.last_used(), store.warmth(), store.added()
    pins = {*store.pins()}
    pinned = {chunk for source in pins for chunk in refs.get(source, ())}
    losses = MeasuredLosses(store)
    chunks = {
        chunk: ChunkHolding(
            chunk,
            levels,
            max(used.get(chunk, 0), added.get(chunk, 0)),
            chunk in pinned,
            frozenset(losses.of(chunk, lossy(levels))),
            warm.get(chunk, 0.0),
        )
        for chunk, levels in sizes.items()
    }
    turned: list[tuple[float, str, DocumentHolding]] = []
    for source, ids in refs.items():
        held = [chunks[chunk] for chunk in ids if chunk in chunks]
        document = DocumentHolding(
            source,
            max((chunk.used for chunk in held), default=0),
            max((added.get(chunk, 0) for chunk in ids), default=0),
            source in pins,
            tuple(dict.fromkeys(ids)),
            texts.get(tables.name_key(source), 0),
        )
        turned.append((max((chunk.turn for chunk in held), default=0), source, document))
    loose = set(chunks) - {chunk for chunk_ids in refs.values() for chunk in chunk_ids} - kept_always(store)
    return Inventory(
        tuple(document for *_, document in sorted(turned)),
        chunks,
        tuple(sorted(loose)),
        layout.folder_bytes(store.path),
        free,
        _stretches(store, used),
        beginning=_beginning(store),
        profile=next(iter(_profiles(store, [bytes.fromhex(str(store.codec_state().get("profile", "")))])), None),
        old_profiles=_profiles(store, old_profiles(store)),
    )


def _stretches(store: Store, used: Mapping[bytes, int]) -> tuple[tuple[bytes, int, int], ...]:
    sizes: dict[bytes, int] = {}
    with store.snapshot() as snapshot:
        for key, size in snapshot.sizes(tables.STRETCHES):
            sizes[key[:ID_BYTES]] = sizes.get(key[:ID_BYTES], 0) + pages(size)
    return tuple((one, used.get(one, 0), sizes.get(one, 0)) for one in in_turn(store.stretches(), used))


def _beginning(store: Store) -> bytes:
    identity = StoreIdentity.from_manifest(store.manifest())
    return identity.prefix_id if identity is not None else b""


def _profiles(store: Store, digests: Collection[bytes]) -> tuple[tuple[bytes, int], ...]:
    with store.snapshot() as snapshot:
        sizes = {digest: pages(size) for digest, size in snapshot.sizes(tables.PROFILES)}
    return tuple((digest, sizes[digest]) for digest in digests if digest in sizes)


def eviction_order(store: Store) -> dict[bytes, float]:
    found = store.warmth()
    for chunk, when in store.added().items():
        found[chunk] = max(found.get(chunk, 0.0), when)
    return found


def kept_always(store: Store) -> set[bytes]:
    """Chunks that stay though no document has them: the prompt's own beginning."""
    return {_beginning(store)} - {b""}


def pinned_with_documents(store: Store) -> set[bytes]:
    """Chunks of the documents that are pinned; of one that is damaged it is unknown which."""
    chunk_ids: set[bytes] = set()
    for source in store.pins():
        with suppress(DamagedError):
            document = store.document(source)
            chunk_ids |= {ref.chunk_id for ref in document.chunks} if document is not None else set()
    return chunk_ids


def level_bytes(snapshot: Snapshot, chunk_id: bytes) -> dict[str, int]:
    return _level_sizes(snapshot, chunk_id).get(chunk_id, {})


def _level_sizes(snapshot: Snapshot, prefix: bytes = b"") -> dict[bytes, dict[str, int]]:
    sizes: dict[bytes, dict[str, int]] = {}
    for key, size in snapshot.sizes(tables.RECORDS, prefix):
        try:
            chunk, level, _ = tables.split_record_key(key)
        except DamagedError:  # found by verify
            continue
        levels = sizes.setdefault(chunk, {})
        levels[level] = levels.get(level, 0) + pages(size)
    return sizes


def pages(size: int) -> int:
    """Return the bytes that dropping a value frees at least: its own pages; half of a value that shares its page."""
    if size >= _OWN_PAGES_FROM:
        return -(-(size + _PAGE_HEADER) // PAGE_BYTES) * PAGE_BYTES
    return (size + _NODE) // 2


def sizes_of(store: Store) -> dict[str, Any]:
    """Count a store's chunks; the prompt's beginning, and chunks without KV, are counted apart. Raises DamagedError."""
    sizes, identity = store.stats(), StoreIdentity.from_manifest(store.manifest())
    beginning = None if identity is None else _own_beginning(store, identity)
    if beginning is not None:
        sizes = sizes | {"chunks": sizes["chunks"] - 1, "tokens": sizes["tokens"] - beginning["tokens"]}
    return sizes | {"prefix": beginning, "without_kv": 0 if identity is None else len(due(store, identity))}


def _own_beginning(store: Store, identity: StoreIdentity) -> dict[str, Any] | None:
    try:
        info = store.chunk_info(identity.prefix_id)
    except DamagedError:
        return None
    if info is None:
        return None
    levels = store.sizes_here(identity.prefix_id)
    tokens = len(info.token_ids) if levels else 0
    return {"id": identity.prefix_id.hex(), "tokens": tokens, "levels": level_rows(levels)}


def old_profiles(store: Store) -> list[bytes]:
    """Return the digests of profiles that no record was made with, and no new one would be. Raises DamagedError."""
    current = str(store.codec_state().get("profile", ""))
    candidates = [digest for digest in store.profile_digests() if digest.hex() != current]
    if not candidates:
        return []
    named = {store.made_with(chunk, level) for chunk in store.chunk_ids() for level in profiled(store.levels(chunk))}
    if None in named:  # a record whose profile is unknown: verify reports it
        return []
    return [digest for digest in candidates if digest.hex() not in named]


PROFILE = "profile"  # name of a step
Drop = tuple[bytes, str]  # chunk, level
Ladder = Callable[[Mapping[str, int], frozenset[str]], list[str]]  # a chunk's levels, those measured -> those to drop


@dataclass(slots=True)
class Step:
    name: str  # `unreferenced`, `checkpoints`, `cold`, `exact`, `level N`, `kv`, `profile`, `documents`
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
