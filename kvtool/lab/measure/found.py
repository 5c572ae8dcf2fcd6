"""Retrieval on its own: which of the sources that a question names were found, and how early."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvtool.core.errors import UsageError
from kvtool.core.evaluate.measures import Row, numbers_of
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.lab.measure.intervals import estimates, mean

if TYPE_CHECKING:
    from kvtool.core.query.prompt import PromptLayout
    from kvtool.core.query.reply import Request
    from kvtool.core.retrieval.finder import Places


def check_sources(places: Places, requests: Sequence[Request]) -> None:
    """Look every expected source up. Raises UsageError where one is not in the store."""
    for name in dict.fromkeys(name for request in requests for name in request.sources):
        places.of_document(name)


def found(places: Places, asked: PromptLayout) -> dict[str, float]:
    """Tell what retrieval found of a question's expected sources; nothing where it names none, or its own chunks.

    Returns
    -------
    `recall` : the share of the sources of which a chunk was found. `reciprocal_rank` : 1 / place of the first such
    chunk among those found, best first; 0 where there is none.
    """
    request = asked.request
    if not request.sources or request.documents or request.chunks:
        return {}
    best_first = [hit.passage.chunk_id for hit in sorted(asked.hits, key=lambda hit: -hit.score)]
    wanted = [_chunks_of(places, name) for name in request.sources]
    ranks = [at for at, chunk in enumerate(best_first, 1) if any(chunk in chunks for chunks in wanted)]
    there = [not chunks.isdisjoint(best_first) for chunks in wanted]
    return {"recall": statistics.fmean(there), "reciprocal_rank": 1 / ranks[0] if ranks else 0.0}


def _chunks_of(places: Places, name: str) -> set[bytes]:
    """The chunks of a document; none of one that the store has not: it cannot be found."""
    with suppress(UsageError):
        return {passage.chunk_id for passage in places.of_document(name)}
    return set()


def retrieval_of(rows: Mapping[int, Mapping[str, Row]]) -> dict[str, Any] | None:
    """Sum up :func:`found` over the questions that name sources; None: none does.

    Returns
    -------
    `count`; means `recall` and `reciprocal_rank` with `intervals` (95 %); `complete`: the share of the questions all of
    whose sources were found.
    """
    known = [question[REFERENCE] for _, question in sorted(rows.items()) if "recall" in question.get(REFERENCE, {})]
    if not known:
        return None
    columns = {name: numbers_of(known, name) for name in ("recall", "reciprocal_rank")}
    estimated = estimates({name: mean(column) for name, column in columns.items()})
    return {
        "count": len(known),
        **{name: estimate.value for name, estimate in estimated.items()},
        "complete": statistics.fmean(recall == 1 for recall in columns["recall"]),
        "intervals": {name: estimate.interval for name, estimate in estimated.items()},
    }
