"""The order of a prune: plan, ask, drop, compact, look at what the disk says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvtool.core.cache import space
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import MAX_LOSS, exact, lossy
from kvtool.core.common.sizes import counted
from kvtool.core.errors import NoSpaceError, UsageError
from kvtool.core.session.levels import MeasuredLosses
from kvtool.core.upkeep.apply import apply, bring_index_up_to_date
from kvtool.core.upkeep.budget import low_water
from kvtool.core.upkeep.inventory import Inventory, take_inventory
from kvtool.core.upkeep.options import PruneOptions
from kvtool.core.upkeep.plan import Plan, Step
from kvtool.core.upkeep.profiles import old_profiles
from kvtool.core.upkeep.prune import Wanted, plan_prune
from kvtool.core.upkeep.remaining import remaining

_ROUNDS = 4  # sizes of small records are estimates: what is above the goal after all is planned again


@dataclass(slots=True)
class PruneReport:
    """What a prune did, or would do; bytes are those of the folder's files.

    Attributes
    ----------
    limit : what the store may hold; None: no size was asked for.
    goal : what the plan goes down to: the limit, or its low watermark.
    after : on a dry run what is expected.
    in_the_way : bytes of what stays, where the limit is not met, by what it is (`upkeep/remaining.py`).
    spared : chunks whose exact records stayed, because what was to stand for them is damaged.
    lossy : chunks that lost levels, and of which all that stays loses more than questions allow; `worst` of them loses
        the most, in nats a token.
    refusal : of a dry run: why it would not be done as it was asked for; None: it would.
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
    in_the_way: dict[str, int] = field(default_factory=dict)
    refusal: UsageError | None = None

    @property
    def reached(self) -> bool:
        """Whether the folder is within its limit."""
        return self.limit is None or self.after <= self.limit

    def to_json(self) -> dict[str, Any]:
        """A JSON object, as `--json` shows it."""
        names = ("goal", "profiles", "spared", "dry_run", "reached", "in_the_way")
        value: dict[str, Any] = {"budget": self.limit, "bytes_before": self.before, "bytes_after": self.after}
        value |= {"bytes_freed": self.compacted, **{name: getattr(self, name) for name in names}}
        value["refused"] = None if self.refusal is None else self.refusal.message
        return value | {"steps": [step.to_json() for step in self.steps]}


def prune(path: Path, options: PruneOptions, now: float | None = None) -> PruneReport:
    """Make a store smaller, by what is coldest and in the order of :func:`plan_prune`.

    Parameters
    ----------
    now : seconds since 1970.

    Raises
    ------
    UsageError : nothing says how far, or much would go unasked.
    NoSpaceError : the disk has no room for the copy without free pages; what was dropped is dropped.
    DamagedError : a document cannot be read, so what it refers to is unknown; nothing was dropped.
    """
    now = time.time() if now is None else now
    with Store.open(path) as store:
        limit, wanted = _wanted(store, options, now)
        if options.dry_run:
            return _rehearse(store, limit, wanted, options)
        with store.writer(options.lock_wait) as writer:
            report = _prune(store, writer, limit, wanted, options)
        if any(step.sources for step in report.steps):
            bring_index_up_to_date(store)
        return report


def _wanted(store: Store, options: PruneOptions, now: float) -> tuple[int | None, Wanted]:
    budget = store.budget() if options.max_size is None else None
    limit = options.max_size if options.max_size is not None else budget
    ages = options.max_age is not None or options.unused is not None
    if limit is None and not ages and options.cold is None:
        raise UsageError(
            "nothing says how small the store should be",
            "give --max-size 20GB, keep a budget with `kvtool store budget 20GB`, or see --unused and --cold",
        )

    def before(age: float | None) -> float | None:
        return None if age is None else now - age

    wanted = Wanted(
        goal=low_water(budget) if budget is not None else limit,
        cold_before=before(options.cold),
        unused_before=before(options.unused),
        added_before=before(options.max_age),
        as_needed=ages and options.max_size is not None,
        fetched=store.is_front,
    )
    return limit, wanted


def _rehearse(store: Store, limit: int | None, wanted: Wanted, options: PruneOptions) -> PruneReport:
    inventory = take_inventory(store)
    plan = plan_prune(inventory, wanted)
    report = PruneReport(limit, wanted.goal, inventory.used, inventory.used, list(plan.steps), dry_run=True)
    report.profiles = len(old_profiles(store))
    report.refusal = None if options.yes else _refusal(inventory, plan)
    _weigh(report, inventory, store)
    if options.compact and _is_too_large(inventory.used, wanted.goal):
        report.compacted = inventory.used - plan.expected
        report.after = plan.expected
    if not report.reached:
        report.in_the_way = remaining(store, inventory, report.after)
    return report


def _prune(store: Store, writer: Writer, limit: int | None, wanted: Wanted, options: PruneOptions) -> PruneReport:
    writer.fold_access()
    report = PruneReport(limit, wanted.goal, space.folder_bytes(store.path))
    report.profiles = writer.drop_profiles(old_profiles(store))
    inventory = take_inventory(store)
    for number in range(_ROUNDS):
        plan = plan_prune(inventory, wanted)
        if number == 0 and not options.yes and (refusal := _refusal(inventory, plan)):
            raise refusal
        report.spared += len(apply(store, writer, plan))
        report.steps += plan.steps
        if options.compact and _is_too_large(space.folder_bytes(store.path), wanted.goal):
            report.compacted += _compacted(writer, report.steps)
        report.after = space.folder_bytes(store.path)
        inventory = take_inventory(store)
        if options.compact:  # done where it was needed: what is left of free pages does not go by another
            inventory = replace(inventory, free=0)
        if not plan.steps or report.after - (0 if options.compact else inventory.free) <= (limit or report.after):
            break
    _weigh(report, inventory, store)
    if not report.reached:
        report.in_the_way = remaining(store, inventory, report.after)
    return report


def _weigh(report: PruneReport, inventory: Inventory, store: Store) -> None:
    """Count the chunks that questions will read with more loss than they allow, now that levels of them went."""
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
    """Give free pages back to the disk. Raises NoSpaceError, which says what is dropped all the same."""
    try:
        return writer.compact()
    except NoSpaceError as error:
        levels, documents = sum(len(step.drops) for step in steps), sum(len(step.sources) for step in steps)
        gone = f"{counted(documents, 'document')} and {counted(levels, 'level')} of chunks are dropped"
        raise NoSpaceError(f"{gone}, but {error.message}", error.hint) from error


def _is_too_large(size: int, goal: int | None) -> bool:
    return goal is not None and size > goal


def _refusal(inventory: Inventory, plan: Plan) -> UsageError | None:
    """Whether to ask first: more than half of what a question could hit would be gone, or of the documents."""
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
