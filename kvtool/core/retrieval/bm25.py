"""BM25 (Robertson and Zaragoza 2009; Lucene's variant, k1 = 1.5, b = 0.75) over the living chunks of an index."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvtool.core.retrieval.index import Index
from kvtool.core.retrieval.postings import key_of
from kvtool.core.retrieval.segment import Segment
from kvtool.core.retrieval.tables import Array

_K1, _B = 1.5, 0.75


def scores(index: Index, words: Sequence[str]) -> Array:
    """Of every chunk, float64 `[rows]`; 0 where none of the words stands. A word counts as often as it is given."""
    found = np.zeros(index.rows)
    count, total = _living(index)
    if not count or not total:
        return found
    norms = [(_K1 * (1 - _B + _B * one.lengths / (total / count))).astype(np.float32) for one in index.segments]
    parts = np.split(found, index.offsets[1:])  # views
    for term, times in Counter(words).items():
        lists = [_living_postings(segment, term) for segment in index.segments]
        with_term = sum(len(rows) for rows, _ in lists)
        weight = times * idf(with_term, count)
        for (rows, counts), norm, part in zip(lists, norms, parts, strict=True):
            times_there = counts.astype(np.float32)
            part[rows] += weight * (times_there / (times_there + norm[rows]))
    return found


def idf(with_term: int, count: int) -> float:
    """How much a term tells that stands in so many of `count` chunks."""
    return math.log(1 + (count - with_term + 0.5) / (with_term + 0.5))


def keywords(index: Index, words: Sequence[str], most: int = 5) -> list[str]:
    """The terms of a text that tell it from the others: highest count × idf first; ties by the term."""
    count, _ = _living(index)
    worth = {
        term: times * idf(sum(len(_living_postings(one, term)[0]) for one in index.segments), count)
        for term, times in Counter(words).items()
    }
    return sorted(worth, key=lambda term: (-worth[term], term))[:most]


def _living(index: Index) -> tuple[int, int]:
    """Chunks, and terms in all of them."""
    lengths = [one.lengths if one.living is None else one.lengths[one.living] for one in index.segments]
    return sum(map(len, lengths)), sum(int(one.sum(dtype=np.int64)) for one in lengths)


def _living_postings(segment: Segment, term: str) -> tuple[Array, Array]:
    rows, counts = segment.words.of(key_of(term))
    if segment.living is None:
        return rows, counts
    kept = segment.living[rows]
    return rows[kept], counts[kept]
