"""Reading of a store without its model: chunks by a question, a chunk with its neighbours, whole documents."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from heapq import nsmallest
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.agent.results import Excerpt, Found, Status, Stretch
from kvtool.core.common.types import Warn
from kvtool.core.errors import StoreFormatError, UsageError
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.staleness import changes
from kvtool.core.remote.opening import open_store
from kvtool.core.retrieval.finder import Finder
from kvtool.core.retrieval.passages import Hit, Passage, passages_in, place_and_text
from kvtool.core.session.identity import known_result, store_identity
from kvtool.core.upkeep.inventory import sizes_of

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store


class Shelf:
    """A store that is opened at its first use, and anew where another one stands in its place. Threads may share it."""

    def __init__(self, place: Path | str, options: QueryOptions, warn: Warn) -> None:
        self._place, self._options, self._warn = place, options, warn
        self._lock = threading.RLock()
        self._open: tuple[Store, Finder] | None = None

    def close(self) -> None:
        """Let go of the store."""
        with self._lock:
            if self._open is not None:
                self._open[0].close()
                self._open = None

    def search(self, question: str, top_k: int, only: Sequence[str]) -> Found:
        """Find chunks. Raises as `Finder.find` does."""
        options = replace(self._options, only=tuple(only) or self._options.only)
        with self._reading() as (store, finder):
            hits = finder.find(question, top_k, options.retrieval).hits
            since = changes(store, [hit.passage.source for hit in hits])
            return Found([_excerpt(store, hit.passage, since, hit) for hit in hits])

    def read(self, chunk: str, before: int, after: int) -> Stretch:
        """A chunk and its neighbours. Raises UsageError where there is no such chunk."""
        with self._reading() as (store, finder):
            passage, *_ = finder.places.of_chunks(chunk)
            document = store.document(passage.source)
            passages = passages_in(document) if document is not None else [passage]
            first = max(0, passage.index - before)
            chosen = passages[first : passage.index + after + 1]
            since = changes(store, [passage.source])
            excerpts = [_excerpt(store, each, since) for each in chosen]
            return Stretch(passage.source, first + 1, len(passages), excerpts)

    def sources(self, after: str, count: int) -> list[str]:
        """The first names of documents behind a name, sorted; at most so many."""
        with self._reading() as (store, _):
            return nsmallest(count, (source for source in store.sources() if source > after))

    def text(self, source: str) -> str:
        """The text of a document by its very name. Raises UsageError where it is not in the store."""
        with self._reading() as (store, _):
            document = store.document(source)
            if document is None:
                raise UsageError(f"document {source!r} is not in the store", "the resources list the documents")
            return document.text

    def status(self, roots: Sequence[Path]) -> Status:
        """Report the contents of the store."""
        with self._reading() as (store, _):
            stats, identity = sizes_of(store), store_identity(store)
            verdict = known_result(store, identity.fingerprint)
            return Status(
                store=str(self._place),
                **{name: stats[name] for name in ("documents", "chunks", "tokens", "bytes")},
                levels=sorted(stats["levels"]),
                model=identity.model,
                lead_in=identity.lead_in.mode,
                gate=None if verdict is None else verdict.passed,
                roots=[str(root) for root in roots],
            )

    @contextmanager
    def _reading(self) -> Iterator[tuple[Store, Finder]]:
        """Hold one state of the store."""
        with self._lock:
            store, finder = self._opened()
            with store.view():
                yield store, finder

    def _opened(self) -> tuple[Store, Finder]:
        if self._open is not None:
            try:
                self._open[0].follow()
            except StoreFormatError:  # another store by now
                self.close()
        if self._open is None:
            store = open_store(self._place, warn=self._warn)
            self._open = store, Finder(store, self._warn)
        return self._open


def _excerpt(store: Store, passage: Passage, since: Mapping[str, str], hit: Hit | None = None) -> Excerpt:
    place, text = place_and_text(store, passage)
    score = None if hit is None else round(hit.score, 4)
    source = passage.source
    origin = store.origin_of(source)
    return Excerpt(passage.chunk_id.hex(), place.behind(source), source, text, score, since[source], origin)
