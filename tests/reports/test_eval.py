"""`kvtool eval` on a small store: its numbers, what it goes on from, what it refuses, and questions it generates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.model.generate import Generated
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.reply import read_batch
from kvtool.core.session.session import Session
from kvtool.reports import questions
from tests.cli.working import QUESTION, Done, drop_records, fail_gate, kvtool, untouched, write_batch

RUNS = ("--runs", "reuse,epic:4,blend:0.1,union:20%")
NAMES = ["full", "reuse", "epic:4", "blend:0.1", "union:0.2"]
TIMES = ("ttft_ms", "ttft_ms_median", "speedup")


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    return write_questions(tmp_path / "questions.jsonl")


def write_questions(path: Path, **changes: Any) -> Path:
    first = {"id": "a", "question": QUESTION, "answers": ["baker B", "1769"], "documents": ["mill1.md"]}
    second = {"id": "b", "question": "When was the first mill built?", "answers": ["1700"]}
    return write_batch(path, first | changes, second, {"question": "Where is the fourth mill?"})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    passes: list[str] = []
    inner = questions.fuse

    def spy(decoder: Any, plan: Any, selector: Any, *args: Any, **more: Any) -> Any:
        passes.append(selector.name)
        return inner(decoder, plan, selector, *args, **more)

    monkeypatch.setattr(questions, "fuse", spy)
    return passes


def evaluate(store: Path, batch: Path, *args: object) -> Done:
    given = args if "--runs" in args else (*RUNS, *args)
    return kvtool("eval", batch, "--store", store, "--max-tokens", "6", *given)


def rows_of(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["runs"] for line in results.read_text().splitlines()[1:]]


def timeless(value: Any) -> Any:
    if isinstance(value, list):
        return [timeless(inner) for inner in value]
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in TIMES}
    return value


@pytest.mark.slow
def test_the_summary(store: Path, batch: Path, results: Path) -> None:
    with untouched(store):
        value = evaluate(store, batch, "--resume", results, "--json").fine().json
    assert value["questions"] == 3
    assert value["failed"] == value["incomplete"] == 0
    assert value["max_tokens"] == 6
    assert [row["run"] for row in value["runs"]] == NAMES
    lines = rows_of(results)
    for row in value["runs"]:
        own = [line[row["run"]] for line in lines]
        assert row["count"] == 3
        assert row["kl_answer"] == pytest.approx(sum(one["kl_answer"] for one in own) / 3)
        assert row["f1"] == pytest.approx(sum(one["f1"] for one in own if "f1" in one) / 2)  # the third has no answer
        assert row["ttft_ms_median"] == sorted(one["ttft_ms"] for one in own)[1]
        assert row["speedup"] == sorted(one["speedup"] for one in own)[1]
        beside = {"f1_difference", "contains_difference"} if row["run"] != "full" else set()
        other = {"kl_first_difference", "kl_answer_difference"} if row["run"] not in ("full", "reuse") else set()
        assert set(row["intervals"]) == {"f1", "contains", "kl_first", "kl_answer"} | beside | other
        for name in ("f1", "contains", "kl_first", "kl_answer"):
            low, high = row["intervals"][name]
            assert low <= row[name] <= high
    full, reuse, *_ = value["runs"]
    assert (full["kl_first"], full["kl_answer"], full["speedup"], full["recomputed_share"]) == (0, 0, 1, 1)
    assert reuse["recomputed_share"] == 0
    assert full["pareto"] is reuse["pareto"] is True
    front = [row for row in value["runs"] if row["pareto"]]
    front.sort(key=lambda row: row["recomputed_share"])
    assert [row["kl_answer"] for row in front] == sorted((row["kl_answer"] for row in front), reverse=True)
    for row in value["runs"]:
        assert row["pareto"] or any(
            one["recomputed_share"] <= row["recomputed_share"] and one["kl_answer"] <= row["kl_answer"] for one in front
        )


def test_numbers_equal_those_of_compare(store: Path, batch: Path, results: Path) -> None:
    evaluate(store, batch, "--runs", "reuse,epic:16,blend:0.15,infoflow:0.15,union:0.15", "--resume", results).fine()
    modes = ["full", "reuse", "epic", "blend", "infoflow", "union"]
    at = ("query", "--store", store, "--batch", batch, "--max-tokens", "6")
    compared = kvtool(*at, "--compare", ",".join(modes)).fine()
    for line, found in zip(compared.lines[:-1], rows_of(results), strict=True):
        by_mode = {name.partition(":")[0]: row for name, row in found.items()}
        assert list(by_mode) == [wanted["fusion"] for wanted in line["runs"]] == modes
        for wanted in line["runs"]:
            row = by_mode[wanted["fusion"]]
            for name in ("kl_first", "kl_answer"):
                assert row[name] == pytest.approx(wanted[name], abs=1e-6)
            for name in ("answer", "answer_equal", "top1_agrees", "bytes_read", "f1", "exact_match", "contains"):
                assert row.get(name) == wanted.get(name)
            for name in ("reused", "recomputed", "fresh"):
                assert row[name] == wanted["tokens"][name]


def test_the_other_name_of_the_command(store: Path, batch: Path, results: Path) -> None:
    at = ("--limit", "2", "--resume", results)
    value = evaluate(store, batch, *at, "--json").fine().json
    given = (batch, "--store", store, "--max-tokens", "6", *RUNS, *at)
    assert kvtool("inspect", "quality", *given, "--json").fine().json == value
    told = evaluate(store, batch, *at).fine().out
    assert [line.split()[0] for line in told.split("\n")[: 1 + len(NAMES)]] == ["run", *NAMES]
    assert "Paired by question" not in told
    assert "quality" not in kvtool("inspect", "--help").fine().out


def test_the_page_has_differences_by_question(store: Path, batch: Path, tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    evaluate(store, batch, "--limit", "2", "--html", html).fine()
    page = html.read_text(encoding="utf-8")
    for word in ("F1 - full", "contains - full", "KL answer - reuse", "Paired by question, 10,000 resamples"):
        assert word in page


def test_the_reference_alone(store: Path, batch: Path, fused: list[str]) -> None:
    value = evaluate(store, batch, "--runs", "full", "--json").fine().json
    assert [row["run"] for row in value["runs"]] == ["full"]
    assert fused == ["full"] * 3


def test_holes_are_told_and_left(store: Path, batch: Path) -> None:
    first = kvtool("store", "ls", "--store", store, "--json").json["documents"][1]["chunks"][0]["id"]
    drop_records(store, first)
    with untouched(store):
        done = evaluate(store, batch, "--limit", "1", "--json")
    assert done.code == 0
    assert "warning: question a: 1 chunk computed in place" in done.err
    assert done.json["incomplete"] == 1


@pytest.mark.slow
def test_after_a_torn_line_only_what_is_missing_runs(
    store: Path, batch: Path, results: Path, fused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate(store, batch, "--resume", results, "--json").fine().json
    lines = results.read_bytes().splitlines(keepends=True)
    results.write_bytes(b"".join(lines[:-1]) + lines[-1][:-20])
    assert fused == ["full", "reuse", "epic", "blend", "union"] * 3
    fused.clear()
    assert timeless(evaluate(store, batch, "--resume", results, "--json").fine().json) == timeless(whole)
    assert len(fused) == 5
    assert results.read_bytes().splitlines()[:-1] == [line.rstrip() for line in lines[:-1]]
    fused.clear()
    monkeypatch.setattr(Session, "open", None)  # nothing is open: no model is loaded
    assert timeless(evaluate(store, batch, "--resume", results, "--json").fine().json) == timeless(whole)
    assert fused == []


@pytest.mark.slow
def test_more_runs_and_more_questions(store: Path, batch: Path, results: Path, fused: list[str]) -> None:
    evaluate(store, batch, "--runs", "reuse,epic:4", "--limit", "1", "--resume", results).fine()
    fused.clear()
    evaluate(store, batch, "--runs", "blend:10%", "reuse", "--limit", "2", "--resume", results).fine()
    assert fused == ["full", "blend", "full", "blend", "reuse"]
    fused.clear()
    whole = evaluate(store, batch, "--resume", results, "--json").fine().json
    assert fused == ["full", "union", "full", "epic", "union", "full", "reuse", "epic", "blend", "union"]
    assert timeless(whole) == timeless(evaluate(store, batch, "--json").fine().json)
    fused.clear()
    assert evaluate(store, batch, "--resume", results, "--limit", "1", "--json").fine().json == whole  # over all
    assert fused == []


@pytest.mark.slow
def test_another_stores_file(store: Path, batch: Path, results: Path, corpus: Path, fresh: Any, tmp_path: Path) -> None:
    evaluate(store, batch, "--limit", "1", "--resume", results).fine()
    before = results.read_bytes()
    fresh(corpus, store=tmp_path / "other").fine()
    evaluate(tmp_path / "other", batch, "--resume", results).failed(2, "other settings: store", "--resume")
    copied = shutil.copytree(store, tmp_path / "copy")
    evaluate(copied, batch, "--resume", results, "--limit", "1").fine()  # the same store elsewhere
    assert results.read_bytes() == before


def test_other_settings(store: Path, batch: Path, results: Path, tmp_path: Path) -> None:
    evaluate(store, batch, "--limit", "1", "--resume", results).fine()
    before = results.read_bytes()
    at = ("--resume", results)
    evaluate(store, batch, *at, "--max-tokens", "7").failed(2, "max tokens 6, now 7")
    evaluate(store, batch, *at, "--level", "raw").failed(2, "level auto, now raw")
    evaluate(store, batch, *at, "--top-k", "2").failed(2, "top k 5, now 2")
    other = write_questions(tmp_path / "other.jsonl", answers=["baker C"])
    evaluate(store, other, *at).failed(2, "batch")
    shutil.copy(batch, tmp_path / "same.jsonl")
    evaluate(store, tmp_path / "same.jsonl", *at, "--limit", "1").fine()
    assert results.read_bytes() == before


def test_errors(store: Path, batch: Path, results: Path, tmp_path: Path) -> None:
    evaluate(store, tmp_path / "nowhere.jsonl").failed(2, "cannot be read")
    evaluate(store, batch, "--runs", "blend:2").failed(2, "not between 0 and 1")
    evaluate(store, batch, "--limit", "0").failed(2)
    evaluate(store, batch, "--level", "99").failed(2)
    evaluate(tmp_path / "nowhere", batch).failed(10)
    evaluate(store, batch, "--resume", batch).failed(2, "line 1")
    assert not results.exists()


@pytest.mark.slow
def test_a_question_that_fails(store: Path, batch: Path, results: Path, fused: list[str]) -> None:
    write_questions(batch, documents=["nowhere.md"])
    for _ in range(2):  # it is tried again, the others are not
        fused.clear()
        done = evaluate(store, batch, "--resume", results, "--json").fine(3)
        assert "warning: question a: document 'nowhere.md' is not in the store" in done.err
        assert (done.json["questions"], done.json["failed"]) == (2, 1)
    assert fused == []
    assert evaluate(store, batch, "--limit", "1", "--json").fine(1).json["runs"] == []


def test_the_gate(store: Path, batch: Path) -> None:
    fail_gate(store)
    evaluate(store, batch, "--limit", "1").failed(12, "law 4", "--force")
    evaluate(store, batch, "--limit", "1", "--force").fine()
    evaluate(store, batch, "--limit", "1", "--runs", "full").fine()


# ---- retrieval and generated questions ----

TWO_RUNS = ("--runs", "reuse,epic:4", "--max-tokens", "6")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return write_batch(
        tmp_path / "mine.jsonl",
        {"question": QUESTION, "answers": ["baker C"], "sources": ["mill2.md"]},
        {"question": QUESTION, "sources": ["mill2.md", "mill4.md"], "generator": "a model"},
        {"question": QUESTION, "documents": ["mill2.md"], "sources": ["mill2.md"]},
        {"question": "When was the first mill built?"},
    )


@pytest.mark.slow
def test_retrieval_and_modes_side_by_side(mine: Path, store: Path) -> None:
    with untouched(store):
        value = kvtool("eval", mine, "--store", store, "--top-k", "1", *TWO_RUNS, "--json").fine().json
    found = value["retrieval"]
    assert found["count"] == 2  # one names its own documents, one names no sources
    assert found["recall"] == 0.75  # of the second question one of two
    assert (found["reciprocal_rank"], found["complete"]) == (1.0, 0.5)
    assert [row["run"] for row in value["runs"]] == ["full", "reuse", "epic:4"]
    assert value["runs"][0]["f1"] >= 0
    assert (value["questions"], value["synthetic"], value["failed"]) == (4, 1, 0)
    assert value["best"]["run"] in ("reuse", "epic:4")


def test_every_mode_as_it_is_by_default_and_words_for_people(mine: Path, store: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    told = kvtool("eval", mine, "--store", store, "--limit", "1", "--max-tokens", "2", "--html", page).fine().out
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
    monkeypatch.setattr(questions, "_said", lambda session, pieces, most: left.pop(0))


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
        made = [request for request in questions.generate_questions(session, 1) if request is not None]
    (request,) = made
    assert request.question == "Who built the mill by the river?"
    assert request.answers == ()
    assert request.sources[0].endswith(".md")
    assert request.generator


def test_an_answer_that_was_cut_off_is_no_truth(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for ends, answers in ((True, ("the baker",)), (False, ())):
        says(monkeypatch, "Who built the mill by the river?", "the baker", ends=ends)
        with Store.open(store) as opened:
            (request,) = questions.generate_questions(Session.open(opened, ModelOptions()), 1)
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
    assert "written by a model" in kvtool("eval", file, "--store", store, *TWO_RUNS).fine().out


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.nightly
def test_a_real_model_writes_questions(tmp_path: Path) -> None:
    corpus = Path(__file__).parents[2] / "samples" / "corpus" / "people" / "ilse-varnholt.md"
    kvtool("ingest", corpus, "--model", "smollm2", "--lead-in", "prefix", "--store", tmp_path / "store").fine()
    made = kvtool("eval", tmp_path / "made.jsonl", "--make", "1", "--store", tmp_path / "store", "--json").fine().json
    assert made["written"][0]["question"].endswith("?")
