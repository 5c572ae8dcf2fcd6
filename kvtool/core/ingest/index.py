"""The retrieval index and the vectors beside it, brought up to date by the ingest so that no question has to."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from kvtool.core.cache.store import Store
from kvtool.core.errors import DamagedError, ModelError
from kvtool.core.ingest.account import Account


def referred_in(store: Store, account: Account, chunk_ids: Collection[bytes]) -> Collection[bytes]:
    """Return those of these chunks that documents refer to, by the index, which is brought up to date first.

    Raises
    ------
    DamagedError : a document cannot be read.
    """
    from kvtool.core.retrieval.index import index_of

    with account.phase("index"):
        return index_of(store, account.warn).holders(chunk_ids)


def update_index(store: Store, account: Account, embedder: str | None, offline: bool) -> None:
    """Bring the index up to date, and the vectors if there are any or are asked for.

    Raises
    ------
    ModelError : the embedder that was asked for cannot be used; one from before is only warned of.
    """
    from kvtool.core.retrieval.embed import remembered
    from kvtool.core.retrieval.finder import Finder

    finder = Finder(store, account.warn)
    with suppress(DamagedError):  # of a document that was there before: `store verify` tells, and so does a query
        index, ref = finder.index, embedder or remembered(store, account.warn)
        if ref is None or not len(index):
            return
        account.events.status(f"vectors by {ref}")
        try:
            finder.embed(ref, offline)
        except ModelError as error:
            if embedder is not None:
                raise
            account.warn(f"no vectors: {error.message}", error.hint)
