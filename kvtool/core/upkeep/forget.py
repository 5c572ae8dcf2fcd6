from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtool.core.cache import tables
from kvtool.core.cache.identity import chunks_named
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.errors import DamagedError, UsageError
from kvtool.core.retrieval.index import index_of
from kvtool.core.upkeep.documents import named_documents
from kvtool.core.upkeep.plan import kept_always, level_bytes, pages, pinned_with_documents


class MuchError(UsageError):
    """More than half of several documents would be removed without consent."""


@dataclass(frozen=True, slots=True)
class Removal:
    sources: tuple[str, ...]  # documents, and files without one
    chunks: int
    size: int  # bytes that a compaction gives back
    refusal: UsageError | None = field(default=None, compare=False)  # of a dry run


def forget(
    path: Path,
    targets: Sequence[str],
    *,
    dry_run: bool = False,
    yes: bool = False,
    lock_wait: float = 0.0,
    before: Callable[[Store, Sequence[str]], None] | None = None,
) -> Removal:
    """Remove the documents that these words select, and bring the index up to date; return what was removed.

    `yes`: also if more than half of several documents would go. `dry_run`: change nothing; `refusal` says why not.
    `before` is called under the writer's lock with the sources that are about to be removed; if it raises, none is.
    """
    with Store.open(path) as store:
        if dry_run:
            return _removal(store, targets, yes)
        with store.writer(lock_wait) as writer:
            removal = _removal(store, targets, yes)
            if removal.refusal is not None:
                raise removal.refusal
            if before is not None:
                before(store, removal.sources)
            writer.remove_documents(removal.sources)
            collect(store, writer)
        bring_index_up_to_date(store)
        return removal


def _removal(store: Store, targets: Sequence[str], yes: bool) -> Removal:
    sources = named_documents(store, targets)
    entries = [entry for source in sources if (entry := store.document(source)) is not None]
    refs = {entry.source: {ref.chunk_id for ref in entry.chunks} for entry in entries}
    index = index_of(store)
    holders = index.holders(set().union(*refs.values()))
    going = [chunk for chunk in set().union(*refs.values()) if holders.get(chunk, set()) <= refs.keys()]
    with store.snapshot() as snapshot:
        size = sum(sum(level_bytes(snapshot, chunk).values()) for chunk in going)
        for key in map(tables.name_key, refs):
            size += sum(pages(length) for _, length in snapshot.sizes(tables.DOCUMENTS, key))
    refusal = _pinned(store, refs)
    if refusal is None and not yes:
        total = len(refs) + index.documents - len(entries)
        if len(refs) > max(1, total // 2):
            text = f"{len(refs)} of {total} documents would be removed"
            refusal = MuchError(text, "`--dry-run` lists them; add --yes to do it")
    return Removal(tuple(sources), len(going), size, refusal)


def _pinned(store: Store, refs: Mapping[str, set[bytes]]) -> UsageError | None:
    pins = store.pins()
    chunks = {bytes.fromhex(chunk) for chunk in pins["chunks"]} | pinned_with_documents(store)
    for source in sorted(refs):
        if source in pins["sources"] or refs[source] & chunks:
            return UsageError(f"{source} is pinned, so nothing was removed", "`kvtool store pin --remove` unpins it")
    return None


def collect(store: Store, writer: Writer) -> None:
    writer.collect(keep=kept_always(store), referred=lambda chunks: index_of(store).holders(chunks))


def bring_index_up_to_date(store: Store) -> None:
    """Update the retrieval index, so that no question has to; `store verify` reports damaged documents."""
    with suppress(DamagedError):
        index_of(store)


def pin(path: Path, targets: Sequence[str], *, lock_wait: float = 0.0) -> dict[str, Any]:
    """Pin documents (by path, folder or glob) or chunks (by id); returns all pins. Raises UsageError."""
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
    """Remove pins, and return those left; a removed document is named by its whole path. Raises UsageError."""
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
