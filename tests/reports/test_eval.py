"""`kvtool eval`: modes and retrieval over one's own questions, and questions that the model writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.model.generate import Generated
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.reply import read_batch
from kvtool.core.session.session import Session
from kvtool.reports import question_generation
from tests.cli.working import QUESTION, kvtool, untouched, write_batch

RUNS = ("--runs", "reuse,epic:4", "--max-tokens", "6")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write_batch(
        tmp_path / "mine.jsonl",
        {"question": QUESTION, "answers": ["baker C"], "sources": ["mill2.md"]},
        {"question": QUESTION, "sources": ["mill2.md", "mill4.md"], "generator": "a model"},
        {"question": QUESTION, "documents": ["mill2.md"], "sources": ["mill2.md"]},
        {"question": "When was the first mill built?"},
    )


@pytest.mark.slow
def test_retrieval_and_modes_side_by_side(questions: Path, store: Path) -> None:
    with untouched(store):
        value = kvtool("eval", questions, "--store", store, "--top-k", "1", *RUNS, "--json").fine().json
    found = value["retrieval"]
    assert found["count"] == 2  # one names its own documents, one names no sources
    assert found["recall"] == 0.75  # of the second question one of two
    assert (found["reciprocal_rank"], found["complete"]) == (1.0, 0.5)
    assert [row["run"] for row in value["runs"]] == ["full", "reuse", "epic:4"]
    assert value["runs"][0]["f1"] >= 0
    assert (value["questions"], value["synthetic"], value["failed"]) == (4, 1, 0)
    assert value["best"]["run"] in ("reuse", "epic:4")


def test_every_mode_as_it_is_by_default_and_words_for_people(questions: Path, store: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    told = kvtool("eval", questions, "--store", store, "--limit", "1", "--max-tokens", "2", "--html", page).fine().out
    for mode in ("full", "reuse", "epic:", "blend:", "infoflow:", "union:"):
        assert f"\n{mode}" in told
    assert "\n1 question says nothing about others" in told
    assert "retrieval: 1.000 (n = 1)" in told
    assert "union" in page.read_text(encoding="utf-8")


def test_a_source_that_the_store_has_not_is_refused_before_a_model_is_loaded(tmp_path: Path, store: Path) -> None:
    file = write_batch(tmp_path / "mine.jsonl", {"question": QUESTION, "sources": ["nowhere.md"]})
    kvtool("eval", file, "--store", store, "--model", "no-such-model").failed(2, "nowhere.md")
    kvtool("eval", "--store", store).failed(2, "needs a file of questions", "--make")
    kvtool("eval", "--make", "3", "--store", store).failed(2, "to write the questions into", "made.jsonl --make 3")
    both = kvtool("eval", "made.jsonl", "--make", "3", "--runs", "reuse,union:5%", "--store", store)
    both.failed(2, "measures nothing yet", "eval made.jsonl --runs reuse,union:5%")


def says(monkeypatch: pytest.MonkeyPatch, *texts: str, ends: bool = True) -> None:
    """Let the model say these, in turn: a tiny random one says nothing that could be a question."""
    left = [Generated(text, (), None, 1.0, finish="stop" if ends else "length") for text in texts]
    monkeypatch.setattr(question_generation, "_said", lambda session, pieces, most: left.pop(0))


def test_only_questions_about_their_passage_are_taken(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(
        monkeypatch,
        "What is this about?",  # nothing of the passage
        "Nobody knows who built the mill.",  # no question
        " Who built the mill by the river?\nAnd when?",
        "nobody at all",  # is not in the passage
    )
    with Store.open(store) as opened:
        session = Session.open(opened, ModelOptions())
        made = [request for request in question_generation.generate_questions(session, 1) if request is not None]
    (request,) = made
    assert request.question == "Who built the mill by the river?"
    assert request.answers == ()
    assert request.sources[0].endswith(".md")
    assert request.generator


def test_an_answer_that_was_cut_off_is_no_truth(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for ends, answers in ((True, ("the baker",)), (False, ())):
        says(monkeypatch, "Who built the mill by the river?", "the baker", ends=ends)
        with Store.open(store) as opened:
            (request,) = question_generation.generate_questions(Session.open(opened, ModelOptions()), 1)
        assert request.answers == answers


@pytest.mark.slow
def test_the_file_that_is_made_can_be_asked(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "made.jsonl"
    kvtool("eval", file, "--make", "2", "--store", store).fine(1)  # the tiny model writes none
    assert not file.exists()
    says(monkeypatch, "Who built the mill by the river?", "baker", "When was the mill built?", "something else")
    value = kvtool("eval", file, "--make", "2", "--store", store, "--json").fine().json
    assert len(value["written"]) == 2
    assert [request.question for request in read_batch(file)] == [row["question"] for row in value["written"]]
    assert all(request.generator for request in read_batch(file))
    kvtool("eval", file, "--make", "2", "--store", store).failed(2, "already")
    says(monkeypatch, "Who built the mill by the river?", "baker", *["No question."] * 20)
    fewer = kvtool("eval", tmp_path / "fewer.jsonl", "--make", "2", "--store", store).fine(3)
    assert "fewer than asked for" in fewer.out
    kvtool("eval", tmp_path / "no" / "made.jsonl", "--make", "2", "--store", store).failed(2, "folder")
    monkeypatch.undo()
    assert "written by a model" in kvtool("eval", file, "--store", store, *RUNS).fine().out


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_writes_questions(tmp_path: Path) -> None:
    corpus = Path(__file__).parents[2] / "samples" / "corpus" / "people" / "ilse-varnholt.md"
    kvtool("ingest", corpus, "--model", "smollm2", "--lead-in", "prefix", "--store", tmp_path / "store").fine()
    made = kvtool("eval", tmp_path / "made.jsonl", "--make", "1", "--store", tmp_path / "store", "--json").fine().json
    assert made["written"][0]["question"].endswith("?")
