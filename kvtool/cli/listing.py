"""`kvtool store ls`: what a store holds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvtool.cli.options import Run, takes
from kvtool.core.cache.options import StoreOptions

if TYPE_CHECKING:
    from kvtool.core.upkeep.listing import Row

_COLUMNS = ("chunk", "tokens", "levels", "bytes", "used", "where")


@takes(StoreOptions)
def ls(
    run: Run,
    wanted: Annotated[
        str,
        typer.Option(
            "--filter",
            metavar="CONDITIONS",
            help='Only chunks that meet all of these: "tokens>200 used<30d level=2 source~*.md". Fields: source, kind, '
            "tokens, chunks, used, level, bytes, pinned.",
            show_default=False,
        ),
    ] = "",
    sort: Annotated[
        str,
        typer.Option(
            "--sort", metavar="[-]FIELD", help="In this order, with a minus in the reverse.", show_default=False
        ),
    ] = "",
) -> None:
    """Documents and their chunks."""
    from kvtool.core.cache.store import Store
    from kvtool.core.upkeep.listing import about, as_documents, parse_filter, parse_sort, rows_of

    meets = parse_filter(wanted)
    in_order = parse_sort(sort) if sort else list
    with Store.open(run.folder) as store, store.view():
        every = rows_of(store)
        rows = in_order([row for row in every if meets(row)])
        documents = as_documents(rows)
        if not wanted.strip():  # one that gave no chunk is there, too
            documents += [about(document) for document in store.documents() if not document.chunks]
    chunks = {row.ref.chunk_id: row.bytes for row in rows}
    value = {"documents": documents, "chunks": len(chunks), "bytes": sum(chunks.values())}
    run.out.result(value, human=lambda: run.out.table(_COLUMNS, [_told(row) for row in rows]))


def _told(row: Row) -> tuple[object, ...]:
    where = f"{row.document.source}[{row.ref.start}:{row.ref.end}]{' (pinned)' if row.pinned else ''}"
    used = "never" if row.last_used is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(row.last_used))
    return row.ref.chunk_id.hex(), row.ref.tokens, " ".join(row.levels) or "none", row.bytes, used, where
