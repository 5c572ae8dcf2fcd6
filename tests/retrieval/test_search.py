"""Ranking: scores against the formula, ties, equal chunks, what a second hop follows, titles, orders and globs."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from kvtool.core.query.retrieve import in_order
from kvtool.core.retrieval.finder import _matcher
from kvtool.core.retrieval.index import Index
from kvtool.core.retrieval.passages import Hit, Passage, title_of
from kvtool.core.retrieval.search import Search, bm25_scores, count_rare, keywords
from kvtool.core.retrieval.segment import IndexSegment
from kvtool.core.retrieval.terms import asked_terms, terms
from tests.retrieval.making import index_of_texts, search_in

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


HOPS = {
    "0-corve": "Ansel Corve\n\nHe kept bees in later years.",
    "1-mill": "River mill\n\nThe mill was built by Ansel Corve.",
    "2-bees": "Bees\n\nBees make honey, and somebody built a hive.",
    "3-hive": "Hive\n\nNobody built a hive in the year of the mill.",
}


def found(texts: dict[str, str], question: str, top_k: int = 5, hop: bool = True) -> list[tuple[str, int]]:
    hits = search_in(index_of_texts(texts), texts).best(question, top_k, hop=hop)
    return [(hit.passage.source, hit.passage.index) for hit in hits]


@pytest.mark.parametrize("question", ["zebra", "", "the of a", "!?", "얼룩말"])
def test_no_match_is_no_hit(question: str) -> None:
    assert found(TEXTS, question) == []


def test_order_of_hits() -> None:
    hits = search_in(index_of_texts(TEXTS), TEXTS).best("river built 1874", 5, hop=False)
    scores = [hit.score for hit in hits]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == 1.0
    assert min(scores) > 0
    lamp = {str(number): f"The lamp is lit. {mark}" for number, mark in enumerate("x y x z x x".split())}
    assert [source for source, _ in found(lamp, "lamp", 3)] == ["0", "1", "3"]
    assert [source for source, _ in found(lamp, "lamp", 9)] == ["0", "1", "3"]
    many = {f"{number:03}": "The lamp is lit." for number in range(200)} | {"999": "A lamp, at last, of some kind."}
    assert [source for source, _ in found(many, "lamp", 2)] == ["000", "999"]


def test_what_is_named_comes_along() -> None:
    question = "What did the builder of the river mill keep?"
    assert ("0-corve", 0) not in found(HOPS, question, 3, hop=False)
    assert ("0-corve", 1) in found(HOPS, "What did the builder of the river mill keep in his years?", 3)
    hits = found(HOPS, question, 4)
    assert "0-corve" in [source for source, _ in hits]
    assert hits[0] == ("1-mill", 0)
    texts = {"a": "Hive\n\nOf wood.", "b": "Other\n\nA hive, a hive and a hive: the hive is a house."}
    assert found(texts, "hive house", 1, hop=False) == [("b", 1)]
    gained = search_in(index_of_texts(texts), texts)
    plain, hopped = (
        {hit.passage.source: hit.score for hit in reversed(gained.best("hive house", 9, hop=hop))}
        for hop in (False, True)
    )
    assert hopped["a"] == pytest.approx(plain["a"] + 0.2 + 0.4 * plain["b"])  # the question names it, and so does b
    assert hopped["b"] == plain["b"]


def test_a_title_that_many_have_says_little() -> None:
    texts = {"m": "Mill\n\nThe mill of the town stands near the notes."} | {
        f"n{number}": f"Notes\n\nSomething else, number {number}." for number in range(50)
    }
    hits = search_in(index_of_texts(texts), texts).best("mill of the town", 60)
    assert hits[0].passage.source == "m"
    assert all(hit.score < 0.05 for hit in hits if hit.passage.source != "m")


def test_allowed_documents_and_likeness() -> None:
    index = index_of_texts(TEXTS)
    allowed = np.array([True, True, False, True, True, True])
    search = Search(index, search_in(index, TEXTS).texts, allowed)
    assert [hit.passage.source for hit in search.best("river", 5)] == ["a"]
    index = index_of_texts(TEXTS)
    search = search_in(index, TEXTS)
    meaning = np.array([0.0, 0.9, 0.1, 0.0, 0.0, 0.0])
    hits = search.best("river", 3, meaning)
    assert [hit.passage.source for hit in hits] == ["b", "c", "a"]
    assert hits[0].score == pytest.approx(0.7 * 0.9)
    assert [hit.passage.source for hit in search.best("zebra", 1, meaning)] == ["b"]


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("# The mill\n\nIt was built.", "The mill"),
        ("\n\n  \nPlain title\ntext", "Plain title"),
        ("", ""),
        ("x" * 121, ""),
        ("x" * 120, "x" * 120),
    ],
)
def test_title(text: str, title: str) -> None:
    assert title_of(text) == title


def test_orders() -> None:
    places = [("b", 30), ("a", 5), ("b", 2), ("c", 0), ("a", 1)]
    hits = [Hit(Passage(bytes(20), source, start, start + 1, 0), 1.0) for source, start in places]

    def order(name: str) -> list[tuple[str, int]]:
        return [(hit.passage.source, hit.passage.start) for hit in in_order(hits, name)]

    assert order("relevance") == places
    assert order("best-last") == places[::-1]
    assert order("document") == [("b", 2), ("b", 30), ("a", 1), ("a", 5), ("c", 0)]


@pytest.mark.parametrize(
    ("source", "glob", "matches"),
    [
        ("/docs/a.md", "*.md", True),
        ("/docs/a.md", "a.md", True),
        ("/docs/a.md", "docs/*", True),
        ("/docs/a.md", "ocs/*", False),
        ("/docs/a.md", "*.txt", False),
        ("/docs/all.jsonl#7", "*.jsonl", True),
        ("/docs/all.jsonl#7", "*#7", True),
    ],
)
def test_globs(source: str, glob: str, matches: bool) -> None:
    assert _matcher([glob])(source) is matches
