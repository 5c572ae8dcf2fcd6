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
Forms = tuple[str, ...]  # one word's terms in several languages


def scores(index: Index, words: Sequence[Forms]) -> Array:
    """Score every chunk: float64 `[rows]`, 0 where none of the words stands. A word counts as often as it is given, and
    as one, whatever of its forms a chunk has."""
    chunk_scores = np.zeros(index.rows)
    count, total = _living(index)
    if not count or not total:
        return chunk_scores
    mean = total / count
    norms = [(_K1 * (1 - _B + _B * segment.lengths / mean)).astype(np.float32) for segment in index.segments]
    parts = np.split(chunk_scores, index.offsets[1:])  # views
    for forms, times in Counter(words).items():
        found = [_best(segment, forms, norm) for segment, norm in zip(index.segments, norms, strict=True)]
        weight = times * idf(sum(len(rows) for rows, _ in found), count)
        for (rows, shares), part in zip(found, parts, strict=True):
            part[rows] += weight * shares
    return chunk_scores


def _best(segment: IndexSegment, forms: Forms, norm: Array) -> tuple[Array, Array]:
    """The living rows that have a form of a word, and how much of the most that it can count the best form does."""
    lists = []
    for form in forms:
        rows, counts = _living_postings(segment, form)
        frequency = counts.astype(np.float32)
        lists.append((rows, frequency / (frequency + norm[rows])))
    if len(lists) == 1:
        return lists[0]
    best = np.zeros(len(segment), np.float32)
    for rows, shares in lists:
        best[rows] = np.maximum(best[rows], shares)
    rows = np.flatnonzero(best)
    return rows, best[rows]


def idf(with_term: int, count: int) -> float:
    """Inverse document frequency: how much a term tells that stands in `with_term` of `count` chunks."""
    return math.log(1 + (count - with_term + 0.5) / (with_term + 0.5))


def weights(index: Index, words: Iterable[Forms]) -> dict[Forms, float]:
    """Return the idf of each of the words that some chunk has."""
    count, _ = _living(index)
    return {forms: idf(with_word, count) for forms, with_word in _holding(index, words).items() if with_word}


def keywords(index: Index, words: Sequence[str], most: int = 5) -> list[str]:
    """The terms that tell a text from the others: highest count × idf first, ties by the term."""
    times = Counter(words)
    worth = {term: times[term] * weight for (term,), weight in weights(index, ((term,) for term in times)).items()}
    return sorted(worth, key=lambda term: (-worth[term], term))[:most]


def rare(index: Index, words: Sequence[Forms], share: float) -> int:
    """Count the words that occur in some chunks, but in no more than this share of all."""
    most = max(1.0, share * _living(index)[0])
    return sum(0 < with_word <= most for with_word in _holding(index, words).values())


def _holding(index: Index, words: Iterable[Forms]) -> dict[Forms, int]:
    """Count the living chunks that have each of the words, in any of its forms."""
    return {forms: sum(_chunks_with(segment, forms) for segment in index.segments) for forms in {*words}}


def _chunks_with(segment: IndexSegment, forms: Forms) -> int:
    rows = [_living_postings(segment, form)[0] for form in forms]
    return len(rows[0]) if len(rows) == 1 else len(np.unique(np.concatenate(rows)))


def _living(index: Index) -> tuple[int, int]:
    """Return the number of live chunks, and of the terms in all of them."""
    lengths = [segment.living_lengths for segment in index.segments]
    return sum(map(len, lengths)), sum(int(of_segment.sum(dtype=np.int64)) for of_segment in lengths)


def _living_postings(segment: IndexSegment, term: str) -> tuple[Array, Array]:
    rows, counts = segment.words.of(key_of(term))
    if segment.living is None:
        return rows, counts
    kept = segment.living[rows]
    return rows[kept], counts[kept]
