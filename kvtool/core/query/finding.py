"""Which chunks a request is answered from: named by it, or found. No model is needed, and torch is not imported."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence

from kvtool.core.errors import UsageError
from kvtool.core.model.between import step_aside
from kvtool.core.query.defer import spans
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.core.retrieval.finder import Finder, Retrieval
from kvtool.core.retrieval.passages import Hit, Passage


def chunks_for(
    finder: Finder, request: Request, options: QueryOptions, prefer: Container[bytes] | None = None
) -> list[Hit]:
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
        return _named(request.chunks, finder.places.of_chunks)
    if request.documents:
        return _named(request.documents, finder.places.of_document)
    retrieval = Retrieval(options.retriever, options.embedder, options.only, options.offline)
    hits = finder.find(request.search or request.question, options.top_k, retrieval, prefer=prefer)
    if not options.defer:
        return in_order(hits, options.order)
    rounds = spans(len(hits), options.defer_first)
    return [hit for start, stop in rounds for hit in in_order(hits[start:stop], options.order)]


def _named(names: Sequence[str], find: Callable[[str], Sequence[Passage]]) -> list[Hit]:
    """Return the passages of several names; between two of them others may go on."""
    hits: list[Hit] = []
    for name in names:
        hits += [Hit(place, math.nan) for place in find(name)]
        step_aside()
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
