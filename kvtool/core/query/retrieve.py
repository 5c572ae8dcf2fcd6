"""Retrieval of a question's chunks, without torch: it reports what cannot be found before a model is loaded."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvtool.core.cache.store import Store
from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.errors import UsageError
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import ReplyChunk, Request
from kvtool.core.query.staleness import with_changes
from kvtool.core.retrieval.finder import Finder
from kvtool.core.retrieval.options import RetrievalOptions
from kvtool.core.retrieval.passages import Found, Hit


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Chunks of a request in the order of its prompt, and the revision of the documents they are from."""

    result: Found
    revision: int
    milliseconds: float


def retrieve(
    store: Store,
    finder: Finder,
    request: Request,
    options: QueryOptions,
    prefer: Container[bytes] | None = None,
    timeline: Timeline | None = None,
) -> Retrieved:
    """Find the chunks of a request in one revision of the store. Raises as `find_chunks`."""
    started = time.perf_counter()
    with store.view():
        result, revision = find_chunks(finder, request, options, prefer), store.documents_revision()
    return Retrieved(result, revision, add_span(timeline, "retrieve", started) * 1e3)


def find_chunks(
    finder: Finder, request: Request, options: QueryOptions, prefer: Container[bytes] | None = None
) -> Found:
    """Find the chunks for a request, or look up those it names, in the order of the prompt. `prefer`: ids that win
    ties. Raises UsageError: a named chunk is missing; KvtoolError: nothing was found."""
    if not request.question.strip():
        raise UsageError("the question is empty", "ask something")
    if request.chunks or request.documents:
        return Found(finder.named(request.chunks, request.documents))
    text = request.search or request.question
    finding = replace(options, min_score=0.0) if options.defer else options  # the answer decides how many it needs
    result = finder.find(text, finding, prefer=prefer, is_asked=True)
    rounds = options.rounds(len(result.hits)) if options.defer else [(0, len(result.hits))]
    hits = [hit for start, stop in rounds for hit in in_order(result.hits[start:stop], options.order)]
    return result._replace(hits=hits)


def in_order(hits: Sequence[Hit], order: str) -> list[Hit]:
    """Put hits, given best first, in the order of the prompt; `document`: that with the best hit first."""
    if order == "best-last":
        return list(reversed(hits))
    if order == "document":
        ranks: dict[str, int] = {}
        for hit in hits:
            ranks.setdefault(hit.passage.source, len(ranks))
        return sorted(hits, key=lambda hit: (ranks[hit.passage.source], hit.passage.start))
    return list(hits)


@dataclass(frozen=True, slots=True)
class SearchReport:
    """The passages that match a question, best first; `chunks_omitted`: others, below `min_score`. `corrections`:
    unknown words (`from`) with those searched for (`to`)."""

    question: str
    chunks: list[ReplyChunk]
    chunks_omitted: int = 0
    corrections: Sequence[dict[str, str]] = ()

    def to_json(self) -> dict[str, Any]:
        chunks = [chunk.found() for chunk in self.chunks]
        facts = {"question": self.question, "chunks": chunks, "chunks_omitted": self.chunks_omitted}
        return facts | ({"corrections": [*self.corrections]} if self.corrections else {})


def search(store: Store, finder: Finder, question: str, options: RetrievalOptions) -> SearchReport:
    """Find the passages that a question would be answered from. Raises UsageError: the question is empty, or no
    document matches `source`; NothingFoundError."""
    if not question.strip():
        raise UsageError("the question is empty", "search for something")
    hits, omitted, corrections = finder.find(question, options)
    chunks = with_changes(store, [ReplyChunk.of(store, hit) for hit in hits])
    return SearchReport(question, chunks, omitted, corrections)
