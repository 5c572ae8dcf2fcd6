"""Removal of documents, with the chunks that no other document refers to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtool.core.cache.identity import chunks_named
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import exact, known, lossy
from kvtool.core.errors import DamagedError, UsageError
from kvtool.core.retrieval.index import index_of
from kvtool.core.upkeep.inventory import Inventory, inventory_of, kept_always
from kvtool.core.upkeep.plan import UNFINISHED, Drop, Plan, Planner, PruneRequest
from kvtool.core.upkeep.selectors import named_documents


class MuchError(UsageError):
    """Error: more than half of several documents would be removed, without the user's consent."""


def plan_forget(inventory: Inventory, sources: Iterable[str]) -> Plan:
    """These documents, and the chunks that only they refer to. Pins are not looked at."""
    wanted = set(sources)
    planner = Planner(inventory, PruneRequest())
    step = planner.documents(lambda document: document.source in wanted)
    step.sources += sorted(wanted - set(step.sources))  # files without documents
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
    """Remove the documents that these words select, and bring the index up to date; return what was removed.

    Parameters
    ----------
    yes : also if more than half of several documents would be removed.
    dry_run : change nothing; the plan's `refusal` says why this would not be done, where it would not.
    before : called under the writer's lock with the sources that are about to be removed; if it raises, none is.

    Raises
    ------
    UsageError : a word means nothing, or a document is pinned; MuchError: much would be removed without `yes`.
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


def apply(store: Store, writer: Writer, plan: Plan) -> set[bytes]:
    """Drop what the plan says, a batch of chunks a transaction: killed anywhere, the store is whole and smaller.

    Returns
    -------
    Chunks whose exact records stay after all: the level that was to replace them is damaged, and dropped.
    """
    spared: set[bytes] = set()
    for step in plan.steps:
        if step.stretches:
            writer.drop_stretches(step.stretches)
        if step.profiles:
            writer.drop_profiles(step.profiles, {**store.codec_state(), "profile": ""})
        if step.sources:
            writer.remove_documents(step.sources)
        if step.name == UNFINISHED:
            writer.end_unfinished()
        if step.sources or step.loose:
            continue
        spared |= _drop(store, writer, step.drops)
    if any(step.sources or step.loose for step in plan.steps):
        writer.collect(keep=kept_always(store), referred=lambda chunks: index_of(store).holders(chunks))
    return spared


def _drop(store: Store, writer: Writer, drops: Sequence[Drop]) -> set[bytes]:
    by_level: dict[str, list[bytes]] = {}
    for chunk, level in drops:
        by_level.setdefault(level, []).append(chunk)
    going: dict[bytes, set[str]] = {}
    for chunk, level in drops:
        going.setdefault(chunk, set()).add(level)
    lossless = {chunk for level in exact(by_level) for chunk in by_level[level]}
    spared = {chunk for chunk in lossless if not _rest_is_readable(store, chunk, going[chunk])}
    for level in lossy() if spared else ():  # a level that cannot be read replaces nothing
        writer.drop_level(spared, level)
    for level, chunks in by_level.items():
        writer.drop_level([chunk for chunk in chunks if chunk not in spared], level)
    return spared


def _rest_is_readable(store: Store, chunk: bytes, going: set[str]) -> bool:
    """Return True if the finest level that stays of a chunk can be read, or none is to stay."""
    staying = [level for level in store.levels(chunk) if level not in going]
    if not staying:
        return True
    level = next(iter(known(staying)), staying[0])
    with suppress(DamagedError):
        info = store.chunk_info(chunk)
        layers = info.layers if info is not None else 0
        return all(isinstance(store.read_layer([chunk], level, layer)[0], tuple) for layer in range(layers))
    return False


def bring_index_up_to_date(store: Store) -> None:
    """Update the retrieval index, so that no question has to; `store verify` reports damaged documents."""
    with suppress(DamagedError):
        index_of(store)


def pin(path: Path, targets: Sequence[str], *, lock_wait: float = 0.0) -> dict[str, Any]:
    """Pin documents (by path, folder or glob) or chunks (by id); returns all pins.

    Raises
    ------
    UsageError : a word means nothing in the store.
    """
    with Store.open(path) as store, store.writer(lock_wait) as writer:
        pins = store.pins()
        for target in targets:
            chunks = store.chunks_named(target)
            if len(chunks) == 1:
                pins["chunks"] = sorted({*pins["chunks"], chunks[0].hex()})
            else:
                pins["sources"] = sorted({*pins["sources"], *named_documents(store, [target])})
        writer.set_pins(pins["sources"], pins["chunks"])
        return store.pins()


def unpin(path: Path, targets: Sequence[str], *, lock_wait: float = 0.0) -> dict[str, Any]:
    """Take pins back; what is pinned and gone from the store is named by its whole path or id. Returns all pins.

    Raises
    ------
    UsageError : nothing that is pinned is meant.
    """
    with Store.open(path) as store, store.writer(lock_wait) as writer:
        pins = store.pins()
        for target in targets:
            gone = _meant(store, target, pins)
            if not gone & {*pins["sources"], *pins["chunks"]}:
                raise UsageError(f"{target!r} is not pinned", "`kvtool store pin` without a name lists what is")
            pins = {name: [pin for pin in rows if pin not in gone] for name, rows in pins.items()}
        writer.set_pins(pins["sources"], pins["chunks"])
        return store.pins()


def _meant(store: Store, target: str, pins: dict[str, Any]) -> set[str]:
    chunks = {chunk.hex() for chunk in chunks_named(target, [*map(bytes.fromhex, pins["chunks"])])}
    if target in pins["sources"] or chunks:
        return {target} | chunks
    return set(named_documents(store, [target]))
