"""Which chunks a request is answered from: named by it, or found. No model is needed, and torch is not imported."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence

from kvtool.core.cache.store import Store
from kvtool.core.errors import UsageError
from kvtool.core.model.preemption import run_pending
from kvtool.core.query.defer import spans
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import ReplyChunk, Request
from kvtool.core.retrieval.finder import Finder, Retrieval
from kvtool.core.retrieval.passages import Found, Hit, Passage, place_and_text


def chunks_for(
    finder: Finder, request: Request, options: QueryOptions, prefer: Container[bytes] | None = None
) -> Found:
    """Find the chunks for a request, in the order of the prompt.

    Parameters
    ----------
    prefer : ids of chunks that come first among those of the same score.

    Raises
    ------
    UsageError : there is no such chunk or document. KvtoolError : nothing was found. See `Finder.find`.
    """
    if not request.question.strip():
        raise UsageError("the question is empty", "ask something")
    if request.chunks:
        return Found(_named(request.chunks, finder.places.of_chunks))
    if request.documents:
        return Found(_named(request.documents, finder.places.of_document))
    hits, cut = finder.find(request.search or request.question, options.top_k, retrieval_of(options), prefer=prefer)
    if not options.defer:
        return Found(in_order(hits, options.order), cut)
    rounds = spans(len(hits), options.defer_first)
    return Found([hit for start, stop in rounds for hit in in_order(hits[start:stop], options.order)])


def retrieval_of(options: QueryOptions) -> Retrieval:
    """Return how chunks are to be found; with `--defer` nothing is cut: the answer says how many chunks it needs."""
    min_score = 0.0 if options.defer else options.min_score
    return Retrieval(options.retriever, options.embedder, options.only, options.offline, min_score)


def _named(names: Sequence[str], find: Callable[[str], Sequence[Passage]]) -> list[Hit]:
    """Return the passages of several names; between two of them others may go on."""
    hits: list[Hit] = []
    for name in names:
        hits += [Hit(place, math.nan) for place in find(name)]
        run_pending()
    return hits


def in_order(hits: Sequence[Hit], order: str) -> list[Hit]:
    """Put hits, given best first, in the order in which they are to stand in the prompt.

    `relevance` leaves them, `best-last` turns them round, `document` follows the documents, the one with the best hit
    first.
    """
    if order == "best-last":
        return list(reversed(hits))
    if order == "document":
        ranks: dict[str, int] = {}
        for hit in hits:
            ranks.setdefault(hit.passage.source, len(ranks))
        return sorted(hits, key=lambda hit: (ranks[hit.passage.source], hit.passage.start))
    return list(hits)


def reply_chunk(store: Store, hit: Hit, *, tokens: int = 0, status: str = "", reason: str = "") -> ReplyChunk:
    """Return what a reply says of a chunk that was found, with its text."""
    place, text = place_and_text(store, hit.passage)
    return ReplyChunk(
        id=hit.passage.chunk_id.hex(),
        source=hit.passage.source,
        start=hit.passage.start,
        end=hit.passage.end,
        line=place.line,
        label=place.label,
        score=None if math.isnan(hit.score) else hit.score,
        tokens=tokens,
        status=status,
        reason=reason,
        origin=store.origin_of(hit.passage.source),
        text=text,
    )
