"""Questions that are no search: greetings, and words that no passage has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.errors import NothingFoundError
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.core.query.retrieve import find_chunks
from kvtool.core.retrieval.finder import Finder
from kvtool.core.retrieval.terms import asked_terms, without_idle
from tests.retrieval.making import index_of_texts, search_in

TEXTS = {
    "deposit": "There is a deposit of two coins for each bottle, and you can ask for it at the counter today.",
    "letter": "Hello everyone, good morning and thanks for your help; the mill is open.",
}
GREETINGS = ("Hi there", "Hello!", "Good morning, everyone", "Can you help me?", "What can you do?", "Thanks a lot :)")
SAMPLES = Path(__file__).parents[2] / "samples"


def sources(finder: Finder, question: str, **how: object) -> list[str]:
    hits, *_ = find_chunks(finder, Request(question), QueryOptions(**how))  # type: ignore[arg-type]
    return [hit.passage.source for hit in hits]


@pytest.mark.parametrize("question", [*GREETINGS, "Hi there, xyzzy", "?", "Who are you?"])
def test_a_greeting_finds_nothing(store: Store, question: str) -> None:
    with pytest.raises(NothingFoundError):
        sources(Finder(store), question)


def test_one_word_of_a_passage_is_enough(store: Store) -> None:
    finder = Finder(store)
    assert sources(finder, "Hi there, what about the deposit?") == ["deposit"]
    assert sources(finder, "mill") == ["letter"]
    assert sources(finder, "Was it in the morning?") == ["letter"]
    with pytest.raises(NothingFoundError):
        sources(finder, "Is there a deposit?", source=("letter",))  # which has only its stop words
    options = QueryOptions()
    assert [hit.passage.source for hit in Finder(store).find("hello", options).hits] == ["letter"]


def test_by_meaning_a_question_needs_no_word_of_a_passage(store: Store, static_model: Path) -> None:
    finder, model = Finder(store), str(static_model)
    assert sources(finder, "grinder", retriever="dense", embedder=model)
    with pytest.raises(NothingFoundError):
        sources(finder, "Hi there", retriever="dense", embedder=model)


def test_every_sample_question_is_a_search() -> None:
    texts = {
        str(path): path.read_text(encoding="utf-8")
        for path in sorted((SAMPLES / "corpus").rglob("*"))
        if path.suffix in (".md", ".txt", ".jsonl", ".html")
    }
    index = index_of_texts(texts)
    search = search_in(index, texts)
    lines = (SAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    assert len(questions) > 200
    assert [one for one in questions if not search.matches(asked_terms(without_idle(one), index.languages))] == []
    assert not any(search.matches(asked_terms(without_idle(one), index.languages)) for one in GREETINGS)
