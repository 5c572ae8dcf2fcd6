"""Pins protect from eviction: documents by their source, so that they stay pinned when they change, and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtool.core.cache.identity import chunks_named
from kvtool.core.cache.store import Store
from kvtool.core.errors import UsageError
from kvtool.core.upkeep.naming import named_documents


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
