"""Decision of a prune: all is decided before anything is dropped."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtool.core.cache import tables
from kvtool.core.cache.store import Store
from kvtool.core.common.sizes import shown_size, size_from
from kvtool.core.errors import KvtoolError, NoSpaceError, UsageError
from kvtool.core.upkeep.budget import low_water
from kvtool.core.upkeep.inventory import Inventory, pages, take_inventory
from kvtool.core.upkeep.options import PruneOptions
from kvtool.core.upkeep.plan import Plan
from kvtool.core.upkeep.profiles import old_profiles
from kvtool.core.upkeep.prune import Wanted, plan_prune
from kvtool.core.upkeep.remaining import Remains, left_by, remaining

_MARGIN = 16 * 1024  # what is noted of uses until a size is asked for, and tree pages that removing rewrites


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
    wanted: Wanted
    inventory: Inventory
    plan: Plan
    profiles: tuple[bytes, ...]
    floor: tuple[int, Remains] | None = None
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
        remains = remaining(
            store, inventory, plan.expected, limit, plan=plan, profiles=profiles, fetched=store.is_front
        )
        decision = replace(decision, floor=(plan.expected, remains))
        if not wanted.whatever_the_size:
            return replace(decision, refusal=_out_of_reach(limit, plan.expected, remains))
        wanted = replace(wanted, goal=None)
        decision = replace(decision, wanted=wanted, plan=plan_prune(inventory, wanted))
    return decision if options.yes else replace(decision, refusal=_much(inventory, decision.plan))


def _planned(store: Store, inventory: Inventory, wanted: Wanted, profiles: tuple[bytes, ...]) -> Plan:
    plan = plan_prune(inventory, wanted)
    if plan.reaches:
        return plan
    return replace(plan, expected=min(plan.expected, left_by(store, inventory, plan, profiles)))


def _wanted(store: Store, options: PruneOptions, now: float) -> tuple[int | None, Wanted]:
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

    wanted = Wanted(
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


def _out_of_reach(limit: int, floor: int, remains: Remains) -> NoSpaceError:
    return NoSpaceError(
        f"the store cannot get down to {shown_size(limit)}, so nothing is dropped; without all that may go it holds "
        f"{shown_size(floor)}: {remains.told()}",
        advice_for(limit, floor, remains),
    )


def advice_for(limit: int, floor: int, remains: Remains) -> str:
    """Return the hint for a limit that is below what is left after dropping all that may go."""
    way = f"; for {shown_size(limit)}, {remains.advice()}" if remains.ways else ""
    return f"--max-size {size_from(floor + _MARGIN)} is as small as it gets{way}"


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
