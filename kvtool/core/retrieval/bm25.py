"""BM25 (Robertson and Zaragoza 2009; Lucene's variant, k1 = 1.5, b = 0.75) over the living chunks of an index."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from kvtool.core.retrieval.index import Index
from kvtool.core.retrieval.postings import key_of
from kvtool.core.retrieval.segment import IndexSegment
from kvtool.core.retrieval.tables import Array

_K1, _B = 1.5, 0.75


def scores(index: Index, words: Sequence[str]) -> Array:
    """Score every chunk: float64 `[rows]`, 0 where none of the words stands. A word counts as often as it is given."""
    chunk_scores = np.zeros(index.rows)
    count, total = _living(index)
    if not count or not total:
        return chunk_scores
    mean = total / count
    norms = [(_K1 * (1 - _B + _B * segment.lengths / mean)).astype(np.float32) for segment in index.segments]
    parts = np.split(chunk_scores, index.offsets[1:])  # views
    for term, times in Counter(words).items():
        lists = [_living_postings(segment, term) for segment in index.segments]
        with_term = sum(len(rows) for rows, _ in lists)
        weight = times * idf(with_term, count)
        for (rows, counts), norm, part in zip(lists, norms, parts, strict=True):
            frequency = counts.astype(np.float32)
            part[rows] += weight * (frequency / (frequency + norm[rows]))
    return chunk_scores


def idf(with_term: int, count: int) -> float:
    """Inverse document frequency: how much a term tells that stands in `with_term` of `count` chunks."""
    return math.log(1 + (count - with_term + 0.5) / (with_term + 0.5))


def weights(index: Index, words: Iterable[str]) -> dict[str, float]:
    """Return the idf of each of the terms that some chunk has."""
    count, _ = _living(index)
    return {term: idf(with_term, count) for term, with_term in _holding(index, words).items() if with_term}


def keywords(index: Index, words: Sequence[str], most: int = 5) -> list[str]:
    """The terms that tell a text from the others: highest count × idf first, ties by the term."""
    times = Counter(words)
    worth = {term: times[term] * weight for term, weight in weights(index, times).items()}
    return sorted(worth, key=lambda term: (-worth[term], term))[:most]


def rare(index: Index, words: Sequence[str], share: float) -> int:
    """How many of the terms stand in some chunks, but in no more than this share of all."""
    most = max(1.0, share * _living(index)[0])
    return sum(0 < with_term <= most for with_term in _holding(index, words).values())


def _holding(index: Index, words: Iterable[str]) -> dict[str, int]:
    """Count the living chunks that have each of the terms."""
    return {term: sum(len(_living_postings(segment, term)[0]) for segment in index.segments) for term in {*words}}


def _living(index: Index) -> tuple[int, int]:
    """How many chunks are living, and how many terms stand in all of them."""
    lengths = [segment.living_lengths for segment in index.segments]
    return sum(map(len, lengths)), sum(int(of_segment.sum(dtype=np.int64)) for of_segment in lengths)


def _living_postings(segment: IndexSegment, term: str) -> tuple[Array, Array]:
    rows, counts = segment.words.of(key_of(term))
    if segment.living is None:
        return rows, counts
    kept = segment.living[rows]
    return rows[kept], counts[kept]
