"""Retrieval of a question's chunks, without torch: it reports what cannot be found before a model is loaded."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass

from kvtool.core.cache.store import Store
from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.errors import UsageError
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.core.retrieval.finder import Finder
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
    return Retrieved(result, revision, add_span(timeline, "search", started) * 1e3)


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
    result = finder.find(text, options.top_k, options.retrieval, prefer=prefer, is_asked=True)
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
