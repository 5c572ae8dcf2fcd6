"""Documents that are forgotten, with the chunks that nobody else refers to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from kvtool.core.cache.store import Store
from kvtool.core.errors import UsageError
from kvtool.core.upkeep.apply import apply, bring_index_up_to_date
from kvtool.core.upkeep.inventory import Inventory, inventory_of
from kvtool.core.upkeep.naming import named_documents
from kvtool.core.upkeep.plan import Plan
from kvtool.core.upkeep.prune import Planner, Wanted


class MuchError(UsageError):
    """More than half of several documents would be forgotten, and nobody has said that they are to be."""


def plan_forget(inventory: Inventory, sources: Iterable[str]) -> Plan:
    """These documents, and the chunks that only they refer to. Pins are not looked at."""
    wanted = set(sources)
    planner = Planner(inventory, Wanted())
    step = planner.documents(lambda document: document.source in wanted)
    gave_nothing = sorted(wanted - set(step.sources))  # files without documents
    step = replace(step, sources=(*step.sources, *gave_nothing))
    return Plan((step,) if step.sources else (), planner.expected)


def forget(
    path: Path,
    targets: Sequence[str],
    *,
    dry_run: bool = False,
    yes: bool = False,
    lock_wait: float = 0.0,
    before: Callable[[Store, Sequence[str]], None] | None = None,
) -> Plan:
    """Forget the documents that these words mean (see :mod:`naming`), bring the index up to date; returns what went.

    Parameters
    ----------
    yes : also where more than half of several documents would go.
    dry_run : change nothing; the plan's `refusal` says why this would not be done, where it would not.
    before : called under the writer's lock with the sources that are about to go; nothing goes if it raises.

    Raises
    ------
    UsageError : a word means nothing, or a document is pinned; MuchError: much would go unasked.
    StoreNotFoundError, StoreLockedError, DamagedError : see `core/cache`.
    """
    with Store.open(path) as store:
        if dry_run:
            inventory, plan = _planned(store, targets)
            return replace(plan, refusal=_refusal(inventory, plan, yes))
        with store.writer(lock_wait) as writer:
            inventory, plan = _planned(store, targets)
            if refusal := _refusal(inventory, plan, yes):
                raise refusal
            if before is not None:
                before(store, plan.sources)
            apply(store, writer, plan)
        bring_index_up_to_date(store)
        return plan


def _planned(store: Store, targets: Sequence[str]) -> tuple[Inventory, Plan]:
    sources = named_documents(store, targets)
    inventory = inventory_of(store, sources)
    return inventory, plan_forget(inventory, sources)


def _refusal(inventory: Inventory, plan: Plan, yes: bool) -> UsageError | None:
    going = set(plan.sources) & {document.source for document in inventory.documents}
    pinned = [document.source for document in inventory.documents if document.pinned and document.source in going]
    if pinned:
        return UsageError(f"{pinned[0]} is pinned, so nothing was removed", "`kvtool store unpin` it first")
    all_of_it = len(inventory.documents) + inventory.others
    if not yes and len(going) > max(1, all_of_it // 2):
        return MuchError(
            f"{len(going)} of {all_of_it} documents would be removed",
            "`--dry-run` lists them; add --yes to do it",
        )
    return None
