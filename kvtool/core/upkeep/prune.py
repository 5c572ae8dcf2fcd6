"""The order of a prune: decide, drop, compact, look at what the disk says."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvtool.core.cache import space, tables
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import MAX_LOSS, exact, lossy
from kvtool.core.common.sizes import counted, shown_size, size_from
from kvtool.core.errors import KvtoolError, NoSpaceError, UsageError
from kvtool.core.session.identity import MeasuredLosses
from kvtool.core.upkeep.forget import apply, bring_index_up_to_date
from kvtool.core.upkeep.inventory import Inventory, kept_always, old_profiles, pages, take_inventory
from kvtool.core.upkeep.options import PruneOptions
from kvtool.core.upkeep.plan import NOTHING, Plan, PruneRequest, Step, plan_prune
from kvtool.core.upkeep.size_report import left_by, low_water, parts_in_words, remaining

_ROUNDS = 4  # sizes of small records are estimates: what is above the goal after all is planned again
_MARGIN = 16 * 1024  # what is noted of uses until a size is asked for, and tree pages that removing rewrites


@dataclass(slots=True)
class PruneReport:
    """Report of a prune, or of a dry run; bytes are those of the folder's files.

    Attributes
    ----------
    limit : bytes that the store may hold; None: no size was asked for.
    goal : bytes that the plan aims at: the limit, or its low watermark.
    after : on a dry run the expected bytes.
    smallest : the least limit that can surely be reached, if this one cannot: nothing is dropped for the size then.
    in_the_way : bytes of what stays, if the limit is not met, by kind (`upkeep/size_report.py`).
    spared : chunks whose exact records stayed, because the level that was to replace them is damaged.
    lossy : chunks that lost levels, and of which all that stays loses more than questions allow; `worst` of them loses
        the most, in nats a token.
    refusal : of a dry run: why it would not be done as it was asked for; None: it would.
    shortfall : if the limit is not met, and that is no refusal: the reason, and what would help.
    """

    limit: int | None
    goal: int | None
    before: int
    after: int = 0
    steps: list[Step] = field(default_factory=list)
    compacted: int = 0
    profiles: int = 0
    spared: int = 0
    lossy: int = 0
    worst: float = 0.0
    dry_run: bool = False
    smallest: int | None = None
    in_the_way: dict[str, int] = field(default_factory=dict)
    refusal: KvtoolError | None = None
    shortfall: NoSpaceError | None = None

    @property
    def reached(self) -> bool:
        """Return True if the folder is within its limit."""
        return self.limit is None or self.after <= self.limit

    def to_json(self) -> dict[str, Any]:
        """A JSON object, as `--json` shows it."""
        names = ("goal", "smallest", "profiles", "spared", "dry_run", "reached", "in_the_way")
        value: dict[str, Any] = {"budget": self.limit, "bytes_before": self.before, "bytes_after": self.after}
        value |= {"bytes_freed": self.compacted, **{name: getattr(self, name) for name in names}}
        value["refused"] = None if self.refusal is None else self.refusal.message
        return value | {"steps": [step.to_json() for step in self.steps]}


def prune(path: Path, options: PruneOptions, now: float | None = None) -> PruneReport:
    """Make a store smaller: drop the least used first, in the order of :func:`plan_prune`.

    Parameters
    ----------
    now : seconds since 1970.

    Raises
    ------
    UsageError : no option says how far, or much would be dropped without `yes`.
    NoSpaceError : only a size was asked for, and it cannot be reached: nothing was dropped. Or the disk has no space
        for the copy without free pages; what was dropped is dropped.
    DamagedError : a document cannot be read, so what it refers to is unknown; nothing was dropped.
    """
    now = time.time() if now is None else now
    with Store.open(path) as store:
        if options.dry_run:
            return _dry_run(store, decide(store, options, now), options)
        with store.writer(options.lock_wait) as writer:
            writer.fold_access()
            report = _prune(store, writer, decide(store, options, now), options)
        if any(step.sources for step in report.steps):
            bring_index_up_to_date(store)
        return report


def _begun(decision: Decision) -> PruneReport:
    used = decision.inventory.used
    return PruneReport(decision.limit, decision.goal, used, used, smallest=decision.smallest)


def _dry_run(store: Store, decision: Decision, options: PruneOptions) -> PruneReport:
    inventory, plan = decision.inventory, decision.plan
    report = _begun(decision)
    report.dry_run, report.refusal = True, decision.refusal
    report.profiles = len(decision.profiles)
    _count(report, plan)
    _weigh(report, inventory, store)
    if options.compact and _is_too_large(inventory.used, report.goal):
        report.compacted = inventory.used - plan.expected
        report.after = plan.expected
    if isinstance(decision.refusal, NoSpaceError) and decision.floor is not None:
        report.in_the_way = decision.floor[1]
    elif not report.reached:
        _explain(store, report, decision, inventory, options, plan)
    return report


def _prune(store: Store, writer: Writer, decision: Decision, options: PruneOptions) -> PruneReport:
    if decision.refusal is not None:
        raise decision.refusal
    report = _begun(decision)
    report.profiles = writer.drop_profiles(decision.profiles)
    inventory, plan = decision.inventory, decision.plan
    for number in range(_ROUNDS):
        report.spared += len(apply(store, writer, plan))
        _count(report, plan)
        changed = number == 0 or bool(plan.steps)
        if options.compact and changed and _is_too_large(space.folder_bytes(store.path), report.goal):
            report.compacted += _compacted(writer, report.steps)
        report.after = space.folder_bytes(store.path)
        inventory = take_inventory(store)
        if options.compact:  # done where it was needed: what is left of free pages does not go by another
            inventory = replace(inventory, free=0)
        over = report.after - (0 if options.compact else inventory.free) - (report.limit or report.after)
        if not plan.steps or over <= 0:
            break
        plan = plan_prune(inventory, decision.wanted)
    _weigh(report, inventory, store)
    if not report.reached:
        _explain(store, report, decision, inventory, options)
    return report


def _count(report: PruneReport, plan: Plan) -> None:
    report.steps += plan.steps
    report.profiles += sum(len(step.profiles) for step in plan.steps)


def _explain(
    store: Store,
    report: PruneReport,
    decision: Decision,
    inventory: Inventory,
    options: PruneOptions,
    plan: Plan = NOTHING,
) -> None:
    """Note why the limit is not met; `plan`: what is still to be dropped of the inventory."""
    limit = report.limit or report.after
    gone, compacts = decision.profiles, options.compact
    parts = remaining(store, inventory, report.after, plan=plan, profiles=gone, compacts=compacts)
    report.in_the_way = parts
    over = f"the store holds {shown_size(report.after)}, over {shown_size(limit)}"
    hint = "leave out --no-compact" if parts["free"] else "`kvtool store unpin` and --unused let more be dropped"
    if decision.floor is not None:
        over += f", and could not get below {shown_size(decision.floor[0])}, so nothing was removed for the size"
        hint = _least(decision.floor[0])
    report.shortfall = NoSpaceError(f"{over}: {parts_in_words(parts)}", hint)


def _weigh(report: PruneReport, inventory: Inventory, store: Store) -> None:
    """Count the chunks that questions will read with more loss than they allow, after levels of them were dropped."""
    gone: dict[bytes, set[str]] = {}
    for chunk, level in (drop for step in report.steps for drop in step.drops):
        gone.setdefault(chunk, set()).add(level)
    losses = MeasuredLosses(store)
    for chunk, levels in gone.items():
        held = inventory.chunks.get(chunk)
        stays = set(held.levels) - levels if held is not None else set()
        loss = 0.0 if exact(stays) else min(losses.of(chunk, lossy(stays)).values(), default=0.0)
        if loss > MAX_LOSS:
            report.lossy, report.worst = report.lossy + 1, max(report.worst, loss)


def _compacted(writer: Writer, steps: Sequence[Step]) -> int:
    """Give free pages back to the disk. Raises NoSpaceError, which states what is dropped nevertheless."""
    try:
        return writer.compact()
    except NoSpaceError as error:
        levels, documents = sum(len(step.drops) for step in steps), sum(len(step.sources) for step in steps)
        gone = f"{counted(documents, 'document')} and {counted(levels, 'level')} of chunks are dropped"
        raise NoSpaceError(f"{gone}, but {error.message}", error.hint) from error


def _is_too_large(size: int, goal: int | None) -> bool:
    return goal is not None and size > goal


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision on what to drop from a store.

    Attributes
    ----------
    limit : bytes that the store may have; None: no size was asked for.
    goal : bytes that a plan aims at: the limit, or its low watermark.
    wanted : the request that plans are made of; without a goal if the limit cannot be reached.
    profiles : digests of profiles that no record names any more; they are dropped, too.
    floor : bytes that are left after dropping all that may go, and their parts; None: the limit is not below them.
    refusal : the reason for doing nothing; None: the plan is carried out.
    """

    limit: int | None
    goal: int | None
    wanted: PruneRequest
    inventory: Inventory
    plan: Plan
    profiles: tuple[bytes, ...]
    floor: tuple[int, dict[str, int]] | None = None
    refusal: KvtoolError | None = None

    @property
    def smallest(self) -> int | None:
        """The least size that is sure to be reached, where the limit is not."""
        return None if self.floor is None else self.floor[0] + _MARGIN


def decide(store: Store, options: PruneOptions, now: float) -> Decision:
    """Plan a prune, and hold the plan against its limit.

    A limit that cannot be reached lets nothing go: all KV would have to be computed again, for a store that is too
    large all the same. What was asked for whatever the size is done; where that is nothing, the prune is refused.
    Where the limit can be reached and its low watermark cannot, it is the limit that is gone down to, likewise.

    Raises
    ------
    UsageError : nothing says how far.
    DamagedError : a document cannot be read, so what it refers to is unknown.
    """
    limit, wanted = _wanted(store, options, now)
    profiles = tuple(old_profiles(store))
    inventory = take_inventory(store)
    inventory = replace(inventory, free=inventory.free + _size_of(store, profiles))
    plan = _planned(store, inventory, wanted, profiles)
    if limit is not None and not plan.reaches and plan.expected <= limit:
        wanted = replace(wanted, goal=limit)
        plan = _planned(store, inventory, wanted, profiles)
    decision = Decision(limit, wanted.goal, wanted, inventory, plan, profiles)
    if limit is not None and plan.expected > limit:
        parts = remaining(store, inventory, plan.expected, plan=plan, profiles=profiles)
        decision = replace(decision, floor=(plan.expected, parts))
        if not wanted.whatever_the_size:
            return replace(decision, refusal=_out_of_reach(limit, plan.expected, parts))
        wanted = replace(wanted, goal=None)
        decision = replace(decision, wanted=wanted, plan=plan_prune(inventory, wanted))
    return decision if options.yes else replace(decision, refusal=_much(inventory, decision.plan))


def _planned(store: Store, inventory: Inventory, wanted: PruneRequest, profiles: tuple[bytes, ...]) -> Plan:
    plan = plan_prune(inventory, wanted)
    if plan.reaches:
        return plan
    return replace(plan, expected=min(plan.expected, left_by(store, inventory, plan, profiles)))


def _wanted(store: Store, options: PruneOptions, now: float) -> tuple[int | None, PruneRequest]:
    budget = store.budget() if options.max_size is None else None
    limit = options.max_size if options.max_size is not None else budget
    ages = options.max_age is not None or options.unused is not None
    if limit is None and not ages and options.cold is None:
        raise UsageError(
            "nothing says how small the store should be",
            "give --max-size 20GB, keep a budget with --budget 20GB, or see --unused and --cold",
        )

    def before(age: float | None) -> float | None:
        return None if age is None else now - age

    wanted = PruneRequest(
        goal=low_water(budget) if budget is not None else limit,
        cold_before=before(options.cold),
        unused_before=before(options.unused),
        added_before=before(options.max_age),
        as_needed=ages and options.max_size is not None,
        fetched=store.is_front,
    )
    return limit, wanted


def _size_of(store: Store, profiles: tuple[bytes, ...]) -> int:
    with store.snapshot() as snapshot:
        return sum(pages(size) for digest, size in snapshot.sizes(tables.PROFILES) if digest in profiles)


def _out_of_reach(limit: int, floor: int, parts: Mapping[str, int]) -> NoSpaceError:
    return NoSpaceError(
        f"the store cannot get down to {shown_size(limit)}, so nothing is dropped; without all that may go it holds "
        f"{shown_size(floor)}: {parts_in_words(parts)}",
        _least(floor),
    )


def _least(floor: int) -> str:
    """Return the hint for a limit that is below what is left after dropping all that may go."""
    return f"--max-size {size_from(floor + _MARGIN)} is as small as it gets"


def _much(inventory: Inventory, plan: Plan) -> UsageError | None:
    """Return the error that asks first if more than half of the documents, or of what is hit, would be lost."""
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
    written. The disk needs space for it.

    Raises
    ------
    NoSpaceError : the disk has no space for it; what nothing refers to is dropped all the same.
    """
    with Store.open(path) as store, store.writer(lock_wait) as writer:
        before = space.folder_bytes(store.path)
        chunks = writer.collect(keep=kept_always(store))
        profiles = writer.drop_profiles(old_profiles(store))
        writer.compact()
        return Compacted(before, space.folder_bytes(store.path), chunks, profiles)
