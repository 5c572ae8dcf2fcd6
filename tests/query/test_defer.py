"""Deferred loading: rounds, why each was enough, what they cost, and the threshold they are judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.fusion.selectors import SELECTORS
from kvtool.core.fusion.source import RecentChunks
from kvtool.core.query.answer import answer
from kvtool.core.query.fuse_prompt import judge
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.prompt import lay_out
from kvtool.core.query.reply import Reply, Request
from kvtool.core.retrieval.passages import Hit
from kvtool.core.session.session import Session
from tests.cli.working import QUESTION, SHORT, Done, break_record, chunks_of, damages, kvtool, write_batch

NEVER, AT_ONCE = ("--set", "defer.threshold=2"), ("--set", "defer.threshold=0")
EVERYTHING = ("--ratio", "1", "--link-tokens", "10000")


def ask(store: Path, *more: object) -> Done:
    return kvtool("query", QUESTION, "--store", store, "--documents", "mill2.md", *SHORT, "--json", *more).fine()


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    left_out = ("timing_ms", "rounds", "chunks_remaining", "revision")
    return {name: value for name, value in row.items() if name not in left_out}


def test_a_sure_answer_loads_no_more(store: Path) -> None:
    chunks = chunks_of(store, "mill2.md")
    row = ask(store, "--defer", *AT_ONCE).json
    (one,) = row["rounds"]
    assert one["chunks"] == [chunk["id"] for chunk in row["chunks"]] == chunks[:2]
    assert row["chunks_remaining"] == len(chunks) - 2
    assert one["sufficient"]
    assert 0 < one["confidence"] <= 1
    assert one["bytes_read"] == row["bytes_read"] > 0
    plain = kvtool("query", QUESTION, "--store", store, "--chunks", *chunks[:2], *SHORT, "--json").fine().json
    assert without_times(row) == without_times(plain)


def test_an_unsure_one_loads_everything_and_reads_it_once(store: Path) -> None:
    chunks = chunks_of(store, "mill2.md")
    plain = ask(store, "--fusion", "reuse").json
    row = ask(store, "--fusion", "reuse", "--defer", "--set", "defer.first=1", *NEVER).json
    rounds = [chunks[:1], chunks[1:2], chunks[2:4], chunks[4:8], chunks[8:]]
    assert [one["chunks"] for one in row["rounds"]] == rounds[: len(row["rounds"])]
    assert without_times(row) == without_times(plain)
    assert row["chunks_remaining"] == 0
    assert sum(one["bytes_read"] for one in row["rounds"]) == row["bytes_read"]
    assert [one["sufficient"] for one in row["rounds"]] == [False] * (len(row["rounds"]) - 1) + [True]
    assert row["rounds"][-1]["confidence"] is None


@pytest.mark.some(2)
@pytest.mark.parametrize("mode", SELECTORS)
def test_every_mode_in_rounds_is_lossless_where_it_recomputes_everything(mode: str, store: Path) -> None:
    """`full` and `prefix` keep what they have computed in the rounds before."""
    full = ask(store, "--fusion", "full").json
    row = ask(store, "--fusion", mode, "--defer", *NEVER, *EVERYTHING).json
    assert len(row["rounds"]) > 1
    if mode != "reuse":
        assert row["answer"] == full["answer"]
    tokens = row["tokens"]
    assert tokens["prompt"] == tokens["reused"] + tokens["recomputed"] + tokens["fresh"] == full["tokens"]["prompt"]
    stand = 0
    for one in row["rounds"]:
        counts = one["tokens"]
        assert counts["resident"] == stand
        assert counts["prompt"] == sum(counts[name] for name in ("resident", "reused", "recomputed", "fresh"))
        stand = counts["prompt"] - tokens["fresh"]


@pytest.mark.slow
def test_a_hole_of_a_later_round(store: Path) -> None:
    whole = ask(store, "--defer", *NEVER).json
    chunk = chunks_of(store, "mill2.md")[3]
    break_record(store, chunk, 1)
    done = ask(store, "--defer", *NEVER)
    row = done.json
    assert [one["id"] for one in row["chunks"] if one["status"] == "miss"] == [chunk]
    assert f"warning: chunk {chunk[:12]} was computed in place" in done.err
    assert row["tokens"]["fresh"] == whole["tokens"]["fresh"] + row["chunks"][3]["tokens"]
    again = ask(store, "--defer", *NEVER).json
    assert without_times(again) == without_times(whole)
    assert damages(store) == []


@pytest.mark.slow
def test_found_chunks_stand_by_round_in_the_order_that_is_asked_for(store: Path) -> None:
    def ids(*more: object) -> list[str]:
        asked = ("query", QUESTION, "--store", store, "--set", "search.min_score=0", *SHORT, "--json")
        return [chunk["id"] for chunk in kvtool(*asked, *more).fine().json["chunks"]]

    best = ids("--set", "search.order=relevance")
    assert ids("--defer", *NEVER, "--set", "search.order=relevance") == best
    assert ids("--defer", *NEVER) == [*best[1::-1], *best[3:1:-1], best[4]]


def test_words_say_what_was_loaded(store: Path) -> None:
    done = kvtool("query", QUESTION, "--store", store, "--defer", *AT_ONCE, *SHORT).fine()
    assert "round 1: 2 chunks" in done.err
    assert "is at least 0.000" in done.err
    assert " not loaded" in done.err


@pytest.mark.parametrize("more", [("--fusion", "auto"), ("--compare", "reuse"), ("--slo-ms", "500")])
def test_what_needs_the_whole_prompt_is_refused(store: Path, more: tuple[str, str]) -> None:
    done = kvtool("query", QUESTION, "--store", store, "--defer", *more)
    done.failed(2, "--defer", more[1] if more[0] == "--fusion" else more[0])


def test_a_batch(store: Path, tmp_path: Path) -> None:
    questions = ({"question": QUESTION, "documents": [f"mill{n}.md"]} for n in (1, 2))
    batch = write_batch(tmp_path / "questions.jsonl", *questions)
    *rows, summary = kvtool("query", "--batch", batch, "--store", store, "--defer", *AT_ONCE, *SHORT, "--json").lines
    assert [len(row["rounds"]) for row in rows] == [1, 1]
    assert (summary["rounds"], summary["chunks_loaded"]) == (1, 2)


REQUEST = Request(QUESTION, documents=("mill2.md",))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_the_answer_is_streamed(session: Session, temperature: float) -> None:
    options = QueryOptions(fusion="reuse", max_tokens=12, temperature=temperature, seed=5)
    pieces: list[str] = []

    def said(**more: Any) -> Reply:
        return answer(session, REQUEST, replace(options, **more), pieces.append)

    plain = said()
    pieces.clear()
    reply = said(defer=True, set={"defer.threshold": 2.0})
    assert "".join(pieces) == reply.generated.text == plain.generated.text
    pieces.clear()
    early = said(defer=True, set={"defer.threshold": 0.0})
    assert "".join(pieces) == early.generated.text
    assert len(early.rounds) == 1


def test_the_time_to_the_first_token_holds_all_rounds(session: Session) -> None:
    reply = answer(session, REQUEST, QueryOptions(defer=True, defer_threshold=2.0, max_tokens=3))
    assert reply.timing_ms["ttft"] >= sum(one.timing_ms["round"] for one in reply.rounds)


@pytest.mark.parametrize(
    ("sure", "text", "sufficient", "why"),
    [
        (0.8, "Ilse Varnholt", True, "sure: 0.800"),
        (0.5, "Ilse Varnholt", True, "at least 0.500"),
        (0.4999, "Ilse Varnholt", False, "unsure"),
        (0.99, "The passages do not mention", False, "'do not mention'"),
        (0.99, "NOT FOUND", False, "not found"),
        (0.99, "알 수 없습니다", False, "알 수 없"),
    ],
)
def test_verdicts(sure: float, text: str, sufficient: bool, why: str) -> None:
    given, reason = judge(sure, text, 0.5)
    assert given == sufficient
    assert why in reason


def test_of_equal_scores_the_warm_one_comes_first(session: Session) -> None:
    def hits(top_k: int) -> Sequence[Hit]:
        return lay_out(session, Request("mill"), QueryOptions(top_k=top_k, order="relevance")).hits

    everything = hits(30)
    scores = [hit.score for hit in everything]
    tied = next(number for number in range(1, len(scores)) if scores[number] == scores[number - 1])
    better, worse = everything[tied - 1].passage.chunk_id, everything[tied].passage.chunk_id
    session = replace(session, recent_chunks=RecentChunks(10**9))
    answer(session, Request("mill", chunks=(worse.hex(),)), QueryOptions(max_tokens=1))
    found = hits(tied)
    assert found[-1].passage.chunk_id == worse  # it takes the last wanted rank from the other
    assert [hit.score for hit in found] == scores[:tied]
    assert better != worse
