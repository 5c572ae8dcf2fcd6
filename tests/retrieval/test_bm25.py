"""Scores against the formula, for any segments; keywords."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from kvtool.core.retrieval.index import Index
from kvtool.core.retrieval.search import bm25_scores, count_rare, keywords
from kvtool.core.retrieval.segment import IndexSegment
from kvtool.core.retrieval.terms import asked_terms, terms
from tests.retrieval.making import index_of_texts

TEXTS = {
    "a": "The mill on the river was built by Ansel Corve in 1874.",
    "b": "Bread is made from flour, water and salt.",
    "c": "The river rises in the hills. The river is long. Nobody built a bridge over the river.",
    "d": "강가의 방앗간은 안셀 코르베가 1874년에 지었다.",
    "e": "빵은 밀가루와 물과 소금으로 만든다.",
    "f": "…",
}
QUESTIONS = ["river mill 1874", "방앗간", "river river bread", "zebra", "", "the of a", "물과 built"]


def by_formula(question: str, texts: dict[str, str]) -> list[float]:
    """Robertson and Zaragoza with Lucene's idf, written out."""
    words = [Counter(terms(text)[0]) for text in texts.values()]
    average = sum(map(Counter.total, words)) / len(words)
    found = []
    for own in words:
        score = 0.0
        for term in terms(question)[0]:
            having = sum(term in other for other in words)
            if own[term]:
                idf = math.log(1 + (len(words) - having + 0.5) / (having + 0.5))
                score += idf * own[term] / (own[term] + 1.5 * (0.25 + 0.75 * own.total() / average))
        found.append(score)
    return found


def split(texts: dict[str, str], *sizes: int) -> Index:
    index, items = Index.empty(), list(texts.items())
    for size in sizes:
        some, items = dict(items[:size]), items[size:]
        index.segments += index_of_texts(some).segments
    return index


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("sizes", [(6,), (1, 5), (2, 2, 1, 1)])
def test_the_formula(question: str, sizes: tuple[int, ...]) -> None:
    assert bm25_scores(split(TEXTS, *sizes), asked_terms(question)) == pytest.approx(by_formula(question, TEXTS))


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_dead_leave_no_trace(question: str) -> None:
    index = split(TEXTS, 4, 2)
    index.segments[0].bury(np.array([1, 2]))
    living = {source: TEXTS[source] for source in "adef"}
    found = bm25_scores(index, asked_terms(question))
    assert found[[0, 3, 4, 5]] == pytest.approx(by_formula(question, living))
    assert not found[[1, 2]].any()
    merged = Index.empty()
    merged.segments = [IndexSegment.merged(index.segments)]
    assert bm25_scores(merged, asked_terms(question)).tolist() == found[[0, 3, 4, 5]].tolist()


def test_a_word_of_several_forms_counts_as_one() -> None:
    """By the form that a chunk has most of; its rarity is counted over the chunks that have any of them."""
    texts = {"a": "river brook", "b": "river mill", "c": "brook mill", "d": "mill bread"}
    index = split(texts, 3, 1)
    one = bm25_scores(index, [("river", "brook")])
    joined = {"a": "river bread", "b": "river mill", "c": "river mill", "d": "mill bread"}
    assert one == pytest.approx(bm25_scores(split(joined, 3, 1), [("river",)]))
    assert count_rare(index, [("river", "brook"), ("mill",), ("zebra", "bread")], 0.25) == 1
    assert count_rare(index, [("river", "brook"), ("mill",), ("zebra", "bread")], 1.0) == 3


def test_nothing_and_keywords() -> None:
    assert bm25_scores(Index.empty(), [("mill",)]).tolist() == []
    assert bm25_scores(index_of_texts({"a": "…"}), [("mill",)]).tolist() == [0.0]
    index = index_of_texts(TEXTS)
    assert keywords(index, terms(TEXTS["c"])[0], 1) == ["river"]
    assert "built" not in keywords(index, terms(TEXTS["a"])[0], 4)  # another text has it, too
    assert keywords(index, [], 4) == []
