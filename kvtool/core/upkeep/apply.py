"""Carrying a plan out: the one place where upkeep writes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import exact, known, lossy
from kvtool.core.errors import DamagedError
from kvtool.core.retrieval.index import index_of
from kvtool.core.upkeep.inventory import kept_always
from kvtool.core.upkeep.plan import UNFINISHED, Drop, Plan
from kvtool.core.upkeep.profiles import without_profile


def apply(store: Store, writer: Writer, plan: Plan) -> set[bytes]:
    """Drop what the plan says, a batch of chunks a transaction: killed anywhere, the store is whole and smaller.

    Returns
    -------
    Chunks whose exact records stay after all: what was to stand for them is damaged, and dropped.
    """
    spared: set[bytes] = set()
    for step in plan.steps:
        if step.stretches:
            writer.drop_stretches(step.stretches)
        if step.profiles:
            writer.drop_profiles(step.profiles, without_profile(store.codec_state()))
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
    spared = {chunk for chunk in lossless if not _stands_in(store, chunk, going[chunk])}
    for level in lossy() if spared else ():  # what cannot be read stands for nothing: the exact record does
        writer.drop_level(spared, level)
    for level, chunks in by_level.items():
        writer.drop_level([chunk for chunk in chunks if chunk not in spared], level)
    return spared


def _stands_in(store: Store, chunk: bytes, going: set[str]) -> bool:
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
    """Update the retrieval index, so that no question has to; `store verify` tells of damaged documents."""
    with suppress(DamagedError):
        index_of(store)
