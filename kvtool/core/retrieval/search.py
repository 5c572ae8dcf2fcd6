"""Question → chunks, best first: what matches it, and, in a second hop, what the best matches and itself name. Measured
by the recall of all gold paragraphs among five (samples/results/retrieval.md)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtool.core.retrieval.index import Index
from kvtool.core.retrieval.passages import Hit, Passage
from kvtool.core.retrieval.segment import Array, IndexSegment, key_of, positions_in
from kvtool.core.retrieval.terms import asked_terms, folded, near_words, typed_words, words_in

_K1, _B = 1.5, 0.75
Forms = tuple[str, ...]  # one word's terms in several languages


def bm25_scores(index: Index, words: Sequence[Forms]) -> Array:
    """Score every chunk, float64 `[rows]`. A word counts as often as it is given; its forms count as one."""
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
    return math.log(1 + (count - with_term + 0.5) / (with_term + 0.5))


def idf_weights(index: Index, words: Iterable[Forms]) -> dict[Forms, float]:
    count, _ = _living(index)
    return {forms: idf(with_word, count) for forms, with_word in _holding(index, words).items() if with_word}


def keywords(index: Index, words: Sequence[str], most: int = 5) -> list[str]:
    times = Counter(words)
    worth = {term: times[term] * weight for (term,), weight in idf_weights(index, ((term,) for term in times)).items()}
    return sorted(worth, key=lambda term: (-worth[term], term))[:most]


def count_rare(index: Index, words: Sequence[Forms], share: float) -> int:
    most = max(1.0, share * _living(index)[0])
    return sum(0 < with_word <= most for with_word in _holding(index, words).values())


def _holding(index: Index, words: Iterable[Forms]) -> dict[Forms, int]:
    counts = Counter[Forms]()
    for forms, segment in itertools.product({*words}, index.segments):
        rows = [_living_postings(segment, form)[0] for form in forms]
        counts[forms] += len(rows[0]) if len(rows) == 1 else len(np.unique(np.concatenate(rows)))
    return counts


def _living(index: Index) -> tuple[int, int]:
    lengths = [segment.living_lengths for segment in index.segments]
    return sum(map(len, lengths)), sum(int(of_segment.sum(dtype=np.int64)) for of_segment in lengths)


def _living_postings(segment: IndexSegment, term: str) -> tuple[Array, Array]:
    rows, counts = segment.words.of(key_of(term))
    if segment.living is None:
        return rows, counts
    kept = segment.living[rows]
    return rows[kept], counts[kept]


def _are_in(tables: Sequence[Array], keys: Array) -> Array:
    """Which keys are in one of several ascending tables, bool `[keys]`."""
    found: Array = np.any([positions_in(each, keys) >= 0 for each in tables], axis=0)
    return found


Place = tuple[int, int]  # number of a segment, number of a document in it


def named_in(index: Index, words: Iterable[str]) -> dict[Place, float]:
    """Documents all of whose title's terms are among the words, each with 1 over the number of equal titles."""
    keys = np.array(sorted({key_of(word) for word in words}), np.uint64)
    places: list[Place] = []
    titles: list[Array] = []
    for number, segment in enumerate(index.segments):
        sizes = segment.title_sizes
        held = np.bincount(segment.titles.rows_of(keys), minlength=len(sizes))
        documents = np.flatnonzero(held == sizes)
        documents = documents[segment.alive[documents]]
        places += [(number, document) for document in documents.tolist()]
        titles.append(segment.tables["title_ids"][documents])
    if not places:
        return {}
    _, which, counts = np.unique(np.concatenate(titles), return_inverse=True, return_counts=True)
    return dict(zip(places, (1 / counts[which]).tolist(), strict=True))


_WORDS = 0.3  # weight of the words where there is a likeness by meaning, too
_NAMED = 0.2  # what a document's best chunk gains when the question names it; the best match has 1
_HOP = 0.4  # what it gains, times the score of the chunk that names it
_ADDED = 0.05  # share of a question's words, by weight, for which a chunk is kept that scores far less than the best
_CORRECTED = 8  # unknown words of a question at most: in a long text a typo matters little, and each takes some time
_FIRST = 5  # chunks of the first hop that are read for names

Texts = Callable[[Passage], str]


@dataclass(frozen=True, slots=True)
class Search:
    """Searches one index. `texts` gives a chunk's text with its document's title, `passages` without: a foreign
    document may name another document's chunk with a different text. `allowed`: bool `[rows]`."""

    index: Index
    texts: Texts
    allowed: Array | None = None
    passages: Texts | None = None

    def best(
        self, question: str, top_k: int, meaning: Array | None = None, hop: bool = True, words: bool = True
    ) -> list[Hit]:
        """Find the best chunks, each once; ties in the order of the documents. `meaning`: likeness, float64 `[rows]` in
        0 … 1."""
        base = self._base(asked_terms(question, self.index.languages) if words else [], meaning)
        score = self._with_hop(question, base) if hop and base.any() else base
        hits: list[Hit] = []
        found: dict[bytes, list[Passage]] = {}
        for row in self._ranked(score, top_k):
            passage = self.index.passage(row)
            alike = found.setdefault(passage.chunk_id, [])
            if any(self.passages is None or self.passages(passage) == self.passages(other) for other in alike):
                continue
            alike.append(passage)
            hits.append(Hit(passage, float(score[row])))
            if len(hits) >= top_k:
                break
        return hits

    def matches(self, words: Sequence[Forms]) -> bool:
        return bool(self._base(words, None).any())

    def corrections(self, question: str) -> list[dict[str, str]]:
        """Unknown words (`from`) with a known word one typo away (`to`): the same ending, then the same first letter,
        then frequency decide."""
        found: list[dict[str, str]] = []
        index, segments = self.index, self.index.segments
        words = ((word, asked_terms(word, index.languages)) for word in dict.fromkeys(typed_words(words_in(question))))
        unknown = (word for word, forms in words if forms and not idf_weights(index, forms))
        for word in itertools.islice(unknown, _CORRECTED):
            near = near_words(word, index.languages)
            keys = np.fromiter((key_of(folded(each)) for each in near), np.uint64, len(near))
            spelled = _are_in([segment.spelled for segment in segments], keys)
            known = spelled | _are_in([segment.words.keys for segment in segments], keys)
            ranks = []
            for to, is_spelled in zip(itertools.compress(near.values(), known), spelled[known].tolist(), strict=True):
                if count := sum(_holding(index, asked_terms(to, index.languages)).values()):
                    ranks.append((is_spelled, to[0] == word[0].casefold(), count, to))
            if ranks:
                found.append({"from": word, "to": max(ranks)[-1]})
        return found

    def helpful(self, question: str, hits: Sequence[Hit], min_score: float) -> list[Hit]:
        """Keep the best hit, those that score at least `min_score` times as much, and those with words of the question
        that better kept ones lack (`_ADDED` of all, by idf). A score above 1 comes from names, and counts as 1."""
        worth = idf_weights(self.index, asked_terms(question, self.index.languages))
        enough = _ADDED * sum(worth.values())
        kept: list[Hit] = []
        known: set[Forms] = set()
        for hit in hits:
            forms = {*itertools.chain.from_iterable(asked_terms(self.texts(hit.passage), self.index.languages))}
            held = {word for word in worth if not forms.isdisjoint(word)}
            is_near = not kept or hit.score >= min_score * min(kept[0].score, 1.0)
            if is_near or sum(worth[word] for word in held - known) >= enough:
                kept.append(hit)
                known |= held
        return kept

    def _base(self, words: Sequence[Forms], meaning: Array | None) -> Array:
        score = self._allowed_only(bm25_scores(self.index, words))
        highest = score.max(initial=0.0)
        if highest > 0:
            score = score / highest
        return score if meaning is None else self._allowed_only(_WORDS * score + (1 - _WORDS) * meaning)

    def _allowed_only(self, score: Array) -> Array:
        return score if self.allowed is None else np.where(self.allowed, score, 0.0)

    def _with_hop(self, question: str, base: Array) -> Array:
        first = base.copy()
        for row, share in self._rows_named(question, base).items():
            first[row] += _NAMED * share
        gains: dict[int, float] = {}
        for row in self._ranked(first, _FIRST)[:_FIRST]:
            document = self.index.document_at(row)
            for other, share in self._rows_named(self.texts(self.index.passage(row)), base).items():
                if self.index.document_at(other) != document:
                    gains[other] = max(gains.get(other, 0.0), _HOP * float(first[row]) * share)
        for row, gain in gains.items():
            first[row] += gain
        return first

    def _rows_named(self, text: str, base: Array) -> dict[int, float]:
        shares = {}
        words = itertools.chain.from_iterable(asked_terms(text, self.index.languages))
        for place, share in named_in(self.index, words).items():
            rows = self.index.rows_of(place)
            if len(rows):
                row = rows.start + int(base[rows.start : rows.stop].argmax())
                if self.allowed is None or self.allowed[row]:
                    shares[row] = share
        return shares

    def _ranked(self, score: Array, count: int) -> list[int]:
        """Rows with a positive score, highest first: enough for `count` different chunks, if so many exist."""
        rows = np.flatnonzero(score > 0)
        wanted = 4 * count + 16  # equal chunks occur in several documents
        while True:
            some = rows
            if len(rows) > wanted:
                least = np.partition(score[rows], len(rows) - wanted)[len(rows) - wanted]
                some = rows[score[rows] >= least]
            places = {row: self.index.passage(row) for row in some.tolist()}
            order = sorted(places, key=lambda row: (-score[row], places[row].source, places[row].start))
            if len(some) == len(rows) or len({places[row].chunk_id for row in order}) >= count:
                return order
            wanted *= 4
