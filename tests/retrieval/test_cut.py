"""Cutting what was found: a chunk stays near the best score, and far below it only with words that others lack."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.core.query.retrieve import find_chunks
from kvtool.core.retrieval.finder import Finder
from tests.retrieval.making import retrieval, store_of

TEXTS = {
    "dome": "the observatory was founded by ilse varnholt who founded the observatory on the hill",
    "mill": "the mill by the river was founded by a miller, of whom little else is known in the town today",
    "ferry": "the ferry was founded by the town and runs in summer, when the water of the river is low enough",
    "clock": "of the caretaker it is said that he corrects the clock by a coin, once in a month of thirty days",
    "tower": "the observatory was founded by ilse varnholt who founded the observatory on the hills",
}
FOUNDED = "Who founded the observatory?"


@pytest.fixture
def finder(store: Store) -> Finder:
    return Finder(store)


def found(finder: Finder, question: str, top_k: int = 5, **how: object) -> tuple[set[str], int]:
    hits, cut, _ = find_chunks(finder, Request(question), QueryOptions(top_k=top_k, **how))  # type: ignore[arg-type]
    return {hit.passage.source for hit in hits}, cut


def test_what_scores_far_less_and_adds_no_word_is_cut(finder: Finder) -> None:
    assert found(finder, FOUNDED) == ({"dome", "tower"}, 2)
    assert found(finder, FOUNDED, top_k=3) == ({"dome", "tower"}, 1)
    assert found(finder, FOUNDED, top_k=1) == ({"dome"}, 0)


def test_a_chunk_far_behind_stays_for_words_of_the_question_that_the_better_ones_lack(finder: Finder) -> None:
    sources, cut = found(finder, "Who founded the observatory of ilse varnholt on the hill, and corrects the clock?")
    assert sources == {"dome", "tower", "clock"}
    assert cut == 2


def test_a_share_of_0_cuts_nothing_and_one_of_1_keeps_what_is_as_good_as_the_best(finder: Finder) -> None:
    assert found(finder, FOUNDED, min_score=0.0) == ({"dome", "tower", "mill", "ferry"}, 0)
    assert found(finder, FOUNDED, min_score=1.0) == ({"dome", "tower"}, 2)
    assert found(finder, FOUNDED, min_score=0.1) == ({"dome", "tower", "mill", "ferry"}, 0)


def test_what_is_named_or_read_in_rounds_is_not_cut(finder: Finder) -> None:
    hits, cut, _ = find_chunks(finder, Request(FOUNDED, documents=("clock", "mill")), QueryOptions())
    assert [hit.passage.source for hit in hits] == ["clock", "mill"]
    assert cut == 0
    assert found(finder, FOUNDED, defer=True) == ({"dome", "tower", "mill", "ferry"}, 0)


def test_likeness_alone_cuts_nothing(tmp_path: Path, static_model: Path) -> None:
    how = retrieval("dense", static_model, top_k=2, min_score=1.0)
    with store_of(tmp_path / "likened", {"a": "the mill", "b": "the stream", "c": "the loaf"}) as likened:
        hits, cut, _ = Finder(likened).find("grinder grinder river", how)
    assert [hit.passage.source for hit in hits] == ["a", "b"]
    assert cut == 0


def test_a_compound_that_most_chunks_have_tells_them_no_further_apart_than_a_word(tmp_path: Path) -> None:
    for mail, follow in (("e-mail", "follow-up"), ("email", "followup")):
        texts = {
            name: f"the {mail} of {name} is written on the {follow} card number {number} of the office"
            for number, name in enumerate(("karl", "petra", "hugo", "vera", "nils", "olga"))
        }
        with store_of(tmp_path / mail, texts) as store:
            sources, _ = found(Finder(store), f"{mail} {follow} of Karl", min_score=1.0)
        assert sources == {"karl"}
