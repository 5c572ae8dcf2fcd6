"""Ranking: words, ties, equal chunks, and what a second hop follows."""

from __future__ import annotations

import numpy as np
import pytest

from kvtool.core.retrieval.search import Search
from tests.retrieval.making import index_of_texts, search_in
from tests.retrieval.test_bm25 import TEXTS

HOPS = {
    "0-corve": "Ansel Corve\n\nHe kept bees in later years.",
    "1-mill": "River mill\n\nThe mill was built by Ansel Corve.",
    "2-bees": "Bees\n\nBees make honey, and somebody built a hive.",
    "3-hive": "Hive\n\nNobody built a hive in the year of the mill.",
}


def found(texts: dict[str, str], question: str, top_k: int = 5, hop: bool = True) -> list[tuple[str, int]]:
    hits = search_in(index_of_texts(texts), texts).best(question, top_k, hop=hop)
    return [(hit.passage.source, hit.passage.index) for hit in hits]


@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("Who built the mill?", "a"),
        ("What is bread made of?", "b"),
        ("How long is the river?", "c"),
        ("방앗간을 지은 사람은?", "d"),
        ("밀가루로 무엇을 만드나?", "e"),
    ],
)
def test_the_best_passage_comes_first(question: str, first: str) -> None:
    assert found(TEXTS, question)[0][0] == first


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
