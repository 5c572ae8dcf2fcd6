"""Documents that are forgotten, with the chunks that nobody else refers to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.errors import UsageError
from kvtool.core.upkeep.apply import apply, bring_index_up_to_date
from kvtool.core.upkeep.inventory import Inventory, take_inventory
from kvtool.core.upkeep.naming import named_documents
from kvtool.core.upkeep.plan import Growing, Plan


def plan_forget(inventory: Inventory, sources: Iterable[str]) -> Plan:
    """These documents, and the chunks that only they refer to. Pins are not looked at."""
    wanted = set(sources)
    referring = Counter(chunk for document in inventory.documents for chunk in document.refs)
    step = Growing("documents")
    for document in inventory.documents:
        if document.source in wanted:
            step.sources.append(document.source)
            step.size += document.size
            referring.subtract(document.refs)
    step.sources += sorted(wanted - set(step.sources))  # files that gave no document
    for chunk in (chunk for document in inventory.documents for chunk in document.chunks):
        if not referring[chunk]:
            step.loose.append(chunk)
            levels = inventory.chunks[chunk].levels if chunk in inventory.chunks else {}
            step.size += sum(levels.values())
            step.drops += [(chunk, level) for level in levels]
    done = step.done()
    return Plan((done,) if done.sources else (), inventory.used - inventory.free - done.size)


def forget_documents(store: Store, writer: Writer, sources: Iterable[str]) -> Plan:
    """Forget documents by their sources, pinned or not; returns what went.

    Raises
    ------
    DamagedError : a document cannot be read, so what only these refer to is unknown; nothing was dropped.
    """
    plan = plan_forget(take_inventory(store), sources)
    apply(store, writer, plan)
    return plan


def forget(
    path: Path, targets: Sequence[str], *, dry_run: bool = False, yes: bool = False, lock_wait: float = 0.0
) -> Plan:
    """Forget the documents that these words mean (see :mod:`naming`), bring the index up to date; returns what went.

    Parameters
    ----------
    yes : also where more than half of several documents would go.
    dry_run : change nothing; the plan's `refusal` says why this would not be done, where it would not.

    Raises
    ------
    UsageError : a word means nothing, a document is pinned, or much would go unasked.
    StoreNotFoundError, StoreLockedError, DamagedError : see `core/cache`.
    """
    with Store.open(path) as store:
        if dry_run:
            plan = plan_forget(inventory := take_inventory(store), named_documents(store, targets))
            return replace(plan, refusal=_refusal(inventory, plan, yes))
        with store.writer(lock_wait) as writer:
            plan = plan_forget(inventory := take_inventory(store), named_documents(store, targets))
            if refusal := _refusal(inventory, plan, yes):
                raise refusal
            apply(store, writer, plan)
        bring_index_up_to_date(store)
        return plan


def _refusal(inventory: Inventory, plan: Plan, yes: bool) -> UsageError | None:
    going = set(plan.sources) & {document.source for document in inventory.documents}
    pinned = [document.source for document in inventory.documents if document.pinned and document.source in going]
    if pinned:
        return UsageError(f"{pinned[0]} is pinned, so nothing was forgotten", "`kvtool store unpin` it first")
    all_of_it = len(inventory.documents)
    if not yes and len(going) > max(1, all_of_it // 2):
        return UsageError(
            f"{len(going)} of {all_of_it} documents would be forgotten",
            "`--dry-run` lists them; add --yes to do it",
        )
    return None
