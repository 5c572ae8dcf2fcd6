from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvtool.core.cache import tables
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.errors import DamagedError, UsageError
from kvtool.core.retrieval.index import index_of
from kvtool.core.upkeep.documents import named_documents
from kvtool.core.upkeep.plan import kept_always, level_bytes, pages


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
    refusal: UsageError | None = None
    if pinned := sorted(refs.keys() & store.pins()):
        refusal = UsageError(f"{pinned[0]} is pinned, so nothing was removed", "`kvtool store pin --remove` unpins it")
    elif not yes:
        total = len(refs) + index.documents - len(entries)
        if len(refs) > max(1, total // 2):
            text = f"{len(refs)} of {total} documents would be removed"
            refusal = MuchError(text, "`--dry-run` lists them; add --yes to do it")
    return Removal(tuple(sources), len(going), size, refusal)


def collect(store: Store, writer: Writer) -> None:
    writer.collect(keep=kept_always(store), referred=lambda chunks: index_of(store).holders(chunks))


def bring_index_up_to_date(store: Store) -> None:
    """Update the retrieval index, so that no question has to; `store verify` reports damaged documents."""
    with suppress(DamagedError):
        index_of(store)


def pin(path: Path, targets: Sequence[str], *, lock_wait: float = 0.0) -> list[str]:
    """Pin documents, named by path, folder or glob; returns all pinned sources. Raises UsageError."""
    with Store.open(path) as store, store.writer(lock_wait) as writer:
        named = (source for target in targets for source in _named(store, target))
        writer.set_pins([*store.pins(), *named])
        return store.pins()


def unpin(path: Path, targets: Sequence[str], *, lock_wait: float = 0.0) -> list[str]:
    """Remove pins, and return those left; a removed document is named by its whole path. Raises UsageError."""
    with Store.open(path) as store, store.writer(lock_wait) as writer:
        pins = {*store.pins()}
        for target in targets:
            gone = {target} if target in pins else {*_named(store, target)}
            if not gone & pins:
                raise UsageError(f"{target!r} is not pinned", "`kvtool store pin` without a name lists what is")
            pins -= gone
        writer.set_pins(pins)
        return store.pins()


def _named(store: Store, target: str) -> list[str]:
    if store.chunks_named(target):
        hint = "name its document: `kvtool store ls --chunks` lists the chunks with their documents"
        raise UsageError(f"a chunk cannot be pinned: {target!r}", hint)
    return named_documents(store, [target])
