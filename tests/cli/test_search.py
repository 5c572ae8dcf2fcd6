"""`kvtool search`: what is found, without a model."""

from __future__ import annotations

from pathlib import Path

from tests.cli.working import QUESTION, kvtool


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
