"""Search at the command: filters, vectors, where an answer comes from, and `kvtool search`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.working import CHUNKS, PREFIX, QUESTION, SHORT, kvtool
from tests.retrieval.conftest import MEANINGS, tokenizer


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    """A table of vectors by model2vec, in which `grinder` means a mill."""
    from model2vec import StaticModel

    StaticModel(MEANINGS, tokenizer()).save_pretrained(tmp_path / "embedder")
    return tmp_path / "embedder"


def ask(store: Path, *args: object) -> Any:
    return kvtool("query", QUESTION, "--store", store, *SHORT, "--json", *args).fine().json


def test_where_an_answer_comes_from(store: Path) -> None:
    chunks = ask(store)["chunks"]
    for chunk in chunks:
        text = Path(chunk["source"]).read_text(encoding="utf-8")
        assert 1 <= chunk["line"] <= text.count("\n") + 1
        own = text[chunk["start"] : chunk["end"]].strip().split("\n")[0]
        assert own in text.split("\n")[chunk["line"] - 1]
    said = kvtool("query", QUESTION, "--store", store, *SHORT).fine().err
    assert f"sources: {chunks[-1]['source']}:{chunks[-1]['line']}" in said  # the best first, which comes last


def test_only_some_documents(store: Path) -> None:
    found = ask(store, "--set", "search.source=mill0.md", "--set", "search.source=*2.md")["chunks"]
    assert {Path(chunk["source"]).name for chunk in found} <= {"mill0.md", "mill2.md"}
    done = kvtool("query", QUESTION, "--store", store, "--set", "search.source=*.zip")
    done.failed(2, "no document matches *.zip")


def test_the_plan_tells_scores_and_keywords(store: Path) -> None:
    row = kvtool("inspect", "plan", QUESTION, "--store", store, "--json").fine().json
    scores = [chunk["score"] for chunk in row["chunks"]]
    assert scores == sorted(scores)  # the best is last, next to the question
    for chunk in row["chunks"]:
        text = Path(chunk["source"]).read_text(encoding="utf-8")
        assert 0 < len(chunk["keywords"]) <= 5
        assert all(word in text for word in chunk["keywords"])
    shown = kvtool("inspect", "plan", QUESTION, "--store", store).fine().out
    assert row["chunks"][0]["keywords"][0] in shown


@pytest.mark.slow
def test_vectors(tiny: Path, corpus: Path, tmp_path: Path, embedder: Path) -> None:
    corpus = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    path, question = tmp_path / "store", ("query", "grinder", *SHORT, "--json")
    at = ("--store", path, *CHUNKS, *PREFIX)
    kvtool("ingest", corpus, "--model", tiny, *at).fine()
    kvtool(*question, "--store", path).failed(1, "no chunk matches")
    kvtool(*question, "--store", path, "--retriever", "dense").failed(2, "needs an embedding model")
    kvtool("ingest", corpus, "--embedder", tmp_path / "nowhere", *at).failed(12, "no embedding model")
    kvtool("ingest", corpus, "--embedder", embedder, *at).fine()
    assert kvtool(*question, "--store", path).fine().json["chunks"]
    (corpus / "stream.md").write_text("A stream, and nothing else.\n")
    kvtool("ingest", corpus, *at).fine()
    found = kvtool("query", "river", "--retriever", "dense", *SHORT, "--json", "--store", path).fine().json["chunks"]
    assert Path(found[0]["source"]).name == "stream.md"
    embedder.rename(tmp_path / "gone")
    (corpus / "stream.md").unlink()
    done = kvtool("ingest", corpus, "--sync", "--json", *at).fine()
    assert "no vectors" in done.json["warnings"][0]


def test_it_finds_what_a_question_is_answered_from(store: Path) -> None:
    words = QUESTION.split()
    found = kvtool("search", *words, "--store", store, "--json").fine().json
    answered = kvtool("query", QUESTION, "--store", store, "--json").fine().json
    assert found["question"] == QUESTION
    assert [chunk["id"] for chunk in found["chunks"]] == [chunk["id"] for chunk in reversed(answered["chunks"])]
    assert found["chunks_omitted"] == answered["chunks_omitted"]
    assert found["chunks"][0]["text"] == answered["chunks"][-1]["text"]


def test_it_is_read_by_a_person_and_says_what_was_cut(store: Path) -> None:
    at = ("search", *QUESTION.split(), "--store", store)
    everything = kvtool(*at, "--set", "search.min_score=0", "--json").fine().json
    shown = kvtool(*at, "--set", "search.min_score=1").fine()
    assert shown.out.startswith("1.")
    assert shown.out.count("\n\n") < len(everything["chunks"])
    assert "--set search.min_score=0 shows all" in shown.err


def test_a_typo_is_corrected_and_reported(store: Path) -> None:
    said, corrections = "searched for built (no chunk has 'buitl')", [{"from": "buitl", "to": "built"}]
    question, right = "Who buitl the third mill?", kvtool("search", QUESTION, "--store", store, "--json").fine().json
    shown = kvtool("search", question, "--store", store).fine()
    assert said in shown.err
    assert said not in shown.out
    found = kvtool("search", question, "--store", store, "--json").fine().json
    assert (found["chunks"], found["corrections"]) == (right["chunks"], corrections)
    assert "corrections" not in right
    answered = kvtool("query", question, "--store", store, "--json", "--max-tokens", "1").fine()
    assert answered.json["corrections"] == corrections
    assert said in answered.err


def test_words_that_stand_nowhere_and_no_words_are_errors(store: Path) -> None:
    kvtool("search", "zzyzx", "--store", store).failed(1, "no chunk matches")
    for nothing in ((), (" ",)):
        kvtool("search", *nothing, "--store", store).failed(2)
