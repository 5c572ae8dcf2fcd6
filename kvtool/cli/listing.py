"""`kvtool store ls`: what a store holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtool.cli.options import Run, takes
from kvtool.core.cache.options import StoreOptions
from kvtool.core.upkeep.options import ListOptions

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.upkeep.listing import Row

_COLUMNS = ("chunk", "tokens", "levels", "bytes", "used", "where")
_DIGITS = 12  # of an id, as elsewhere; `--json` has all of them


@takes(
    ListOptions,
    StoreOptions,
    examples=("store ls --sort used", 'store ls --filter "tokens>200 used<30d source~*.md"'),
)
def ls(run: Run) -> None:
    """Documents and their chunks."""
    from kvtool.core.cache.store import Store
    from kvtool.core.upkeep.listing import parse_filter, parse_sort, rows_of

    options = run.get(ListOptions)
    meets = parse_filter(options.filter)
    in_order = parse_sort(options.sort) if options.sort else list
    with Store.open(run.folder) as store, store.view():
        rows = in_order(row for row in rows_of(store) if meets(row))
        value = {} if run.out.human else _value(store, rows, filtered=bool(options.filter.strip()))
    run.out.result(value, human=lambda: run.out.table(_COLUMNS, [_told(row) for row in rows]))
    if not rows:
        run.out.status("no chunk meets the filter" if options.filter else "the store holds no chunk")


def _value(store: Store, rows: Sequence[Row], filtered: bool) -> dict[str, Any]:
    from kvtool.core.upkeep.listing import Listed, about, as_documents, origins_of

    documents = as_documents(rows)
    if not filtered:  # one that gave no chunk is there, too
        origins = origins_of(store)
        documents += [about(Listed.of(document, origins)) for document in store.documents() if not document.chunks]
    chunks = {row.ref.chunk_id: row.bytes for row in rows}
    return {"documents": documents, "chunks": len(chunks), "bytes": sum(chunks.values())}


def _told(row: Row) -> tuple[object, ...]:
    made_by = f" (from {row.document.origin})" if row.document.origin else ""
    where = f"{row.document.source}[{row.ref.start}:{row.ref.end}]{' (pinned)' if row.pinned else ''}{made_by}"
    used = "never" if row.last_used is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(row.last_used))
    return row.ref.chunk_id.hex()[:_DIGITS], row.ref.tokens, " ".join(row.levels) or "none", row.bytes, used, where
