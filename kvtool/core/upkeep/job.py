"""The order of a prune: decide, drop, compact, look at what the disk says."""

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
from kvtool.core.common.sizes import counted, shown_size
from kvtool.core.errors import KvtoolError, NoSpaceError
from kvtool.core.session.identity import MeasuredLosses
from kvtool.core.upkeep.apply import apply, bring_index_up_to_date
from kvtool.core.upkeep.decision import Decision, advice_for, decide
from kvtool.core.upkeep.inventory import Inventory, take_inventory
from kvtool.core.upkeep.options import PruneOptions
from kvtool.core.upkeep.plan import NOTHING, Plan, Step
from kvtool.core.upkeep.prune import plan_prune
from kvtool.core.upkeep.remaining import remaining

_ROUNDS = 4  # sizes of small records are estimates: what is above the goal after all is planned again


@dataclass(slots=True)
class PruneReport:
    """Report of a prune, or of a dry run; bytes are those of the folder's files.

    Attributes
    ----------
    limit : bytes that the store may hold; None: no size was asked for.
    goal : bytes that the plan aims at: the limit, or its low watermark.
    after : on a dry run the expected bytes.
    smallest : the least limit that can surely be reached, if this one cannot: nothing is dropped for the size then.
    in_the_way : bytes of what stays, if the limit is not met, by kind (`upkeep/remaining.py`).
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
    """Make a store smaller, by what is coldest and in the order of :func:`plan_prune`.

    Parameters
    ----------
    now : seconds since 1970.

    Raises
    ------
    UsageError : nothing says how far, or much would go unasked.
    NoSpaceError : a size was asked for alone, and cannot be reached: nothing was dropped. Or the disk has no room for
        the copy without free pages; what was dropped is dropped.
    DamagedError : a document cannot be read, so what it refers to is unknown; nothing was dropped.
    """
    now = time.time() if now is None else now
    with Store.open(path) as store:
        if options.dry_run:
            return _rehearse(store, decide(store, options, now), options)
        with store.writer(options.lock_wait) as writer:
            writer.fold_access()
            report = _prune(store, writer, decide(store, options, now), options)
        if any(step.sources for step in report.steps):
            bring_index_up_to_date(store)
        return report


def _begun(decision: Decision) -> PruneReport:
    used = decision.inventory.used
    return PruneReport(decision.limit, decision.goal, used, used, smallest=decision.smallest)


def _rehearse(store: Store, decision: Decision, options: PruneOptions) -> PruneReport:
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
        report.in_the_way = dict(decision.floor[1].parts)
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
    """Tell why the limit is not met; `plan`: what is still to go of the inventory."""
    limit = report.limit or report.after
    sizes, front = (report.after, limit), store.is_front
    remains = remaining(
        store, inventory, *sizes, plan=plan, profiles=decision.profiles, compacts=options.compact, fetched=front
    )
    report.in_the_way = dict(remains.parts)
    over, hint = f"the store holds {shown_size(report.after)}, over {shown_size(limit)}", remains.advice()
    if decision.floor is not None:
        over += f", and could not get below {shown_size(decision.floor[0])}, so nothing went for the size"
        hint = advice_for(limit, *decision.floor)
    report.shortfall = NoSpaceError(f"{over}: {remains.told()}", hint or "a store of this model is not smaller")


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
