"""Size budget, and the order of a prune: decide, drop, compact, look at what the disk says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvtool.core.cache import layout
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import exact, known, lossy
from kvtool.core.common.text import shown_size, size_in_bytes
from kvtool.core.errors import DamagedError, KvtoolError, NoSpaceError, UsageError
from kvtool.core.upkeep.forget import bring_index_up_to_date, collect
from kvtool.core.upkeep.options import PruneOptions
from kvtool.core.upkeep.plan import (
    PROFILE,
    Drop,
    Inventory,
    Plan,
    PruneRequest,
    Step,
    kept_always,
    old_profiles,
    plan_prune,
    take_inventory,
)

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


@dataclass(slots=True)
class PruneReport:
    """Report of a prune, or of a dry run; bytes are those of the folder's files."""

    limit: int | None  # bytes that the store may hold; None: no size was asked for
    goal: int | None  # bytes that the plan aims at: the limit, or its low watermark
    before: int
    after: int  # on a dry run the expected bytes
    steps: list[Step] = field(default_factory=list)
    compacted: int = 0
    exact_retained: int = 0  # chunks whose exact records stayed, because the level that was to replace them is damaged
    dry_run: bool = False
    refusal: KvtoolError | None = None  # of a dry run: why it would not be done as it was asked for; None: it would
    shortfall: NoSpaceError | None = None  # why the limit is not met, if that is no refusal

    @property
    def within_budget(self) -> bool:
        return self.limit is None or self.after <= self.limit

    def is_over_goal(self, size: int) -> bool:
        return self.goal is not None and size > self.goal

    def to_json(self) -> dict[str, Any]:
        return {
            "budget": self.limit,
            "target_bytes": self.goal,
            "bytes_before": self.before,
            "bytes_after": self.after,
            "bytes_freed": self.compacted,
            "profiles": sum(len(step.profiles) for step in self.steps),
            "exact_retained": self.exact_retained,
            "dry_run": self.dry_run,
            "within_budget": self.within_budget,
            "refusal": None if self.refusal is None else self.refusal.message,
            "steps": [step.to_json() for step in self.steps],
        }


def prune(path: Path, options: PruneOptions, now: float | None = None) -> PruneReport:
    """Drop the least used first (see :func:`plan_prune`). Raises UsageError, NoSpaceError or DamagedError."""
    now = time.time() if now is None else now
    with Store.open(path) as store:
        if options.dry_run:
            report, _, plan = _decide(store, options, now)
            report.steps += plan.steps
            if options.compact and report.is_over_goal(report.before):
                report.after = plan.expected
                report.compacted = report.before - report.after
            return report
        with store.writer(options.lock_wait) as writer:
            writer.fold_access()
            report = _prune(store, writer, options, now)
        if any(step.sources for step in report.steps):
            bring_index_up_to_date(store)
        return report


def _prune(store: Store, writer: Writer, options: PruneOptions, now: float) -> PruneReport:
    report, request, plan = _decide(store, options, now)
    if report.refusal is not None:
        raise report.refusal
    while True:
        report.exact_retained += len(_apply(store, writer, plan))
        report.steps += plan.steps
        if options.compact and report.is_over_goal(layout.folder_bytes(store.path)):
            report.compacted += writer.compact()
        report.after = layout.folder_bytes(store.path)
        if report.within_budget or not plan.steps:
            break
        inventory = take_inventory(store)  # sizes of small records are estimates
        if options.compact:  # free pages that a compaction has left stay
            inventory = replace(inventory, free=0)
        plan = plan_prune(inventory, request)
    if not report.within_budget and report.shortfall is None:
        holds = f"the store holds {shown_size(report.after)}, over {shown_size(report.limit or 0)}"
        report.shortfall = NoSpaceError(holds, "" if options.compact else "leave out --no-compact")
    return report


def _apply(store: Store, writer: Writer, plan: Plan) -> set[bytes]:
    """Drop what the plan says, a batch a transaction; return chunks that keep exact records for want of others."""
    spared: set[bytes] = set()
    for step in plan.steps:
        if step.stretches:
            writer.drop_stretches(step.stretches)
        if step.profiles:
            state = {**store.codec_state(), "profile": ""} if step.name == PROFILE else None
            writer.drop_profiles(step.profiles, state)
        if step.sources:
            writer.remove_documents(step.sources)
        if not (step.sources or step.loose):
            spared |= _drop(store, writer, step.drops)
    if any(step.sources or step.loose for step in plan.steps):
        collect(store, writer)
    return spared


def _drop(store: Store, writer: Writer, drops: Sequence[Drop]) -> set[bytes]:
    by_level: dict[str, list[bytes]] = {}
    going: dict[bytes, set[str]] = {}
    for chunk, level in drops:
        by_level.setdefault(level, []).append(chunk)
        going.setdefault(chunk, set()).add(level)
    lossless = {chunk for level in exact(by_level) for chunk in by_level[level]}
    spared = {chunk for chunk in lossless if not _rest_is_readable(store, chunk, going[chunk])}
    for level in lossy() if spared else ():  # a level that cannot be read replaces nothing
        writer.drop_level(spared, level)
    for level, chunks in by_level.items():
        writer.drop_level([chunk for chunk in chunks if chunk not in spared], level)
    return spared


def _rest_is_readable(store: Store, chunk: bytes, going: set[str]) -> bool:
    staying = [level for level in store.levels(chunk) if level not in going]
    if not staying:
        return True
    level = next(iter(known(staying)), staying[0])
    with suppress(DamagedError):
        info = store.chunk_info(chunk)
        layers = info.layers if info is not None else 0
        return all(isinstance(store.read_layer([chunk], level, layer)[0], tuple) for layer in range(layers))
    return False


def _decide(store: Store, options: PruneOptions, now: float) -> tuple[PruneReport, PruneRequest, Plan]:
    """Plan a prune, and hold the plan against its limit: `report.refusal` says why nothing may be done.

    A limit that cannot be reached lets nothing go: all KV would have to be computed again, for a store that is too
    large all the same. What was asked for whatever the size is done; where that is nothing, the prune is refused.
    Where the limit can be reached and its low watermark cannot, it is the limit that is gone down to, likewise.
    """
    limit, request = _request(store, options, now)
    inventory = take_inventory(store)
    plan = plan_prune(inventory, request)
    report = PruneReport(limit, limit, inventory.used, inventory.used, dry_run=options.dry_run)
    if limit is not None and request.goal is not None and request.goal < plan.expected:
        if plan.expected > limit:
            report.shortfall = NoSpaceError(
                f"the store cannot get down to {shown_size(limit)}, so nothing was removed for the size; without all "
                f"that may be removed it holds up to {shown_size(plan.expected)}",
                "`kvtool store pin --remove` and --unused let more be removed",
            )
            report.refusal = None if request.whatever_the_size else report.shortfall
        if report.refusal is None:
            request = replace(request, goal=limit if report.shortfall is None else None)
            plan = plan_prune(inventory, request)
    report.goal = limit if request.goal is None else request.goal
    report.refusal = report.refusal or _too_much(inventory, plan, options)
    return report, request, plan


def _request(store: Store, options: PruneOptions, now: float) -> tuple[int | None, PruneRequest]:
    budget = store.budget() if options.max_size is None else None
    limit = options.max_size if options.max_size is not None else budget
    ages = options.max_age is not None or options.unused is not None
    if limit is None and not ages and options.cold is None:
        raise UsageError(
            "no target size given",
            "give --max-size 20GB, keep a budget with --budget 20GB, or see --unused and --cold",
        )

    ages_given = (options.cold, options.unused, options.max_age)
    cold, unused, added = (None if age is None else now - age for age in ages_given)
    goal = limit if budget is None else int(budget * LOW_WATER)
    return limit, PruneRequest(goal, cold, unused, added, ages and options.max_size is not None, store.is_front)


def _too_much(inventory: Inventory, plan: Plan, options: PruneOptions) -> UsageError | None:
    if options.yes:
        return None
    of_each = {held.chunk_id: sum(held.levels.values()) for held in inventory.chunks.values()}
    losing_all = {chunk for step in plan.steps if step.name in ("kv", "documents") for chunk, _ in step.drops}
    of_chunks, kv = sum(of_each.values()), sum(of_each[chunk] for chunk in losing_all)  # their finer levels, too
    documents = len(inventory.documents)
    if 2 * kv > of_chunks or 2 * len(plan.sources) > max(documents, 2):
        return UsageError(
            f"{kv / 1e6:,.1f} of {of_chunks / 1e6:,.1f} MB of KV and {len(plan.sources)} of {documents} documents "
            "would go",
            "`--dry-run` shows each step; add --yes to do it",
        )
    return None


@dataclass(frozen=True, slots=True)
class Compacted:
    before: int
    after: int
    chunks: int = 0
    profiles: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "bytes_before": self.before,
            "bytes_after": self.after,
            "bytes_freed": self.before - self.after,
            "chunks": self.chunks,
            "profiles": self.profiles,
        }


def compact(path: Path, *, lock_wait: float = 0.0) -> Compacted:
    """Drop what nothing refers to, and copy the store without free pages. Raises NoSpaceError."""
    with Store.open(path) as store, store.writer(lock_wait) as writer:
        before = layout.folder_bytes(store.path)
        chunks = writer.collect(keep=kept_always(store))
        profiles = writer.drop_profiles(old_profiles(store))
        writer.compact()
        return Compacted(before, layout.folder_bytes(store.path), chunks, profiles)
