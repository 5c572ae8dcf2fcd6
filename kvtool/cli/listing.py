"""`kvtool store ls`: what a store holds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvtool.cli.options import Run, takes
from kvtool.core.cache.options import StoreOptions
from kvtool.core.common.marks import as_named_here
from kvtool.core.common.sizes import counted
from kvtool.core.upkeep.options import ListOptions

if TYPE_CHECKING:
    from kvtool.core.upkeep.listing import DocumentRow, Row

_CHUNKS = ("chunk", "tokens", "levels", "bytes", "used", "where")
_DOCUMENTS = ("chunks", "tokens", "levels", "bytes", "used", "modified", "document")
_DAY = "%Y-%m-%d"
_DIGITS = 12  # of an id, as elsewhere; `--json` has all of them


@takes(
    ListOptions,
    StoreOptions,
    examples=("store ls --sort used", 'store ls --chunks --filter "tokens>200 used<30d source~*.md"'),
)
def ls(run: Run) -> None:
    """Documents, or their chunks."""
    from kvtool.core.cache.store import Store
    from kvtool.core.upkeep import listing

    options = run.get(ListOptions)
    meets = listing.parse_filter(options.filter)
    in_order = listing.parse_sort(options.sort or "source")
    with Store.open(run.folder) as store, store.view():
        rows = [row for row in listing.rows_of(store) if meets(row)]
        rows = in_order(rows) if options.chunks else rows
        documents = listing.documents_of(rows)
        unfinished = len(store.unfinished_chunks())
        if not options.filter.strip():
            documents += listing.without_chunks(store)
    documents = documents if options.chunks else in_order(documents)

    def show() -> None:
        if options.chunks:
            run.out.table(_CHUNKS, map(_chunk, rows))
        else:
            run.out.table(_DOCUMENTS, map(_document, documents))

    run.out.result({} if run.out.human else listing.listed(documents, rows), human=show)
    if not rows:
        run.out.status("no chunk meets the filter" if options.filter else "the store holds no whole document")
    if unfinished:
        run.out.status(f"{counted(unfinished, 'chunk')} of files that an ingest did not finish; the next goes on there")


def _chunk(row: Row) -> tuple[object, ...]:
    where = f"{row.document.source}[{row.ref.start}:{row.ref.end}]"
    return row.ref.chunk_id.hex()[:_DIGITS], row.tokens, _levels(row), row.bytes, _used(row), where + _more(row)


def _document(row: DocumentRow) -> tuple[object, ...]:
    where = as_named_here(row.document.source) + _more(row)
    return row.chunks, row.tokens, _levels(row), row.bytes, _used(row), _time(row.document.modified, "", _DAY), where


def _levels(row: Row | DocumentRow) -> str:
    return " ".join(row.levels) or "none"


def _used(row: Row | DocumentRow) -> str:
    return _time(row.last_used, "never", f"{_DAY} %H:%M")


def _more(row: Row | DocumentRow) -> str:
    made_by = f" (from {row.document.origin})" if row.document.origin else ""
    return f"{' (pinned)' if row.pinned else ''}{made_by}"


def _time(seconds: int | None, otherwise: str, form: str) -> str:
    return otherwise if seconds is None else time.strftime(form, time.localtime(seconds))
