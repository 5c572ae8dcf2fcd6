"""The JSON contract (`kvtool help json`): names, types and sums that scripts rely on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtool as package
from kvtool.core.fusion.selectors import MODES
from tests.cli.working import (
    CHUNKS,
    LAYERS,
    PREFIX,
    QUESTION,
    SHORT,
    break_record,
    chunks_of,
    files_below,
    kvtool,
    listing,
    process,
    write_batch,
    write_corpus,
)
from tests.wording import refused

CHUNK = {"id": str, "source": str, "start": int, "end": int, "tokens": int, "status": str}


def check_reply(row: dict[str, Any], retrieved: bool = True) -> None:
    """One answer, as in `query --json`."""
    assert isinstance(row["question"], str)
    assert isinstance(row["answer"], str)
    assert row["fusion"] in MODES
    assert row["chunks"]
    for chunk in row["chunks"]:
        assert {name: type(chunk[name]) for name in CHUNK} == CHUNK
        assert type(chunk["score"]) is (float if retrieved else type(None))
        assert chunk["status"] in ("hit", "exact", "miss")
        assert ("reason" in chunk) == (chunk["status"] == "miss")
        assert chunk["start"] < chunk["end"]
    tokens, timing = row["tokens"], row["timing_ms"]
    assert {type(count) for count in tokens.values()} == {int}
    assert tokens["prompt"] == tokens["reused"] + tokens["recomputed"] + tokens["fresh"]
    assert all(isinstance(value, float | int) and value >= 0 for value in timing.values())
    assert timing["ttft"] >= timing["retrieve"]
    assert type(row["bytes_read"]) is int
    assert (row["bytes_read"] > 0) == (row["fusion"] != "full")


def test_ingest(fresh: Any, tmp_path: Path) -> None:
    done = fresh(write_corpus(tmp_path / "in", 3)).fine()
    row = done.json
    assert row["documents"] == {"added": 3, "changed": 0, "unchanged": 0, "removed": 0, "failed": 0}
    listed = [chunk for document in listing(tmp_path / "fresh") for chunk in document["chunks"]]
    assert row["chunks"]["computed"] == len(listed)
    assert row["tokens"] == sum(chunk["tokens"] for chunk in listed)
    assert row["failures"] == []
    assert row["seconds"] > 0
    assert row["prefill_tokens_per_second"] > 0
    stored = kvtool("store", "stats", "--store", tmp_path / "fresh", "--json").fine().json
    assert row["kv_bytes"] == stored["bytes"]  # the record of the prompt's beginning included
    assert done.err == ""


def test_chunks_join_to_their_document(store: Path, corpus: Path) -> None:
    for document in listing(store):
        text = Path(document["source"]).read_text()
        bounds = [(chunk["start"], chunk["end"]) for chunk in document["chunks"]]
        assert "".join(text[start:end] for start, end in bounds) == text
        assert document["characters"] == len(text)


@pytest.mark.parametrize("mode", MODES)
def test_query(mode: str, store: Path) -> None:
    asked = ("query", QUESTION, "--store", store, "--fusion", mode, "--set", "search.min_score=0", *SHORT, "--json")
    row = kvtool(*asked).fine().json
    check_reply(row)
    assert row["fusion"] == mode
    assert row["question"] == QUESTION
    assert len(row["chunks"]) == 5
    assert "mill2.md" in row["chunks"][-1]["source"]
    scores = [chunk["score"] for chunk in row["chunks"]]
    assert scores == sorted(scores)  # the best is last, next to the question
    assert 1 <= row["tokens"]["generated"] <= 4
    assert row["resolved"]["dtype"] == "float32"
    assert "segments" not in row


@pytest.mark.parametrize("more", [("--fusion", "full"), ("--ratio", "1"), ("--fusion", "epic", "--link-tokens", "999")])
def test_token_ids(more: tuple[str, ...], store: Path, tiny: Path) -> None:
    """A bare transformers model on exactly these ids gives the same greedy answer."""
    args = ("query", QUESTION, "--store", store, "--json", "--token-ids", "--max-tokens", "6")
    row = kvtool(*args, *more).fine().json
    segments = row["segments"]
    assert set(segments) == {"prefix", "lead_in", "chunks", "question"}
    ids = [*segments["prefix"], *(i for chunk in segments["chunks"] for i in chunk), *segments["question"]]
    assert len(ids) == row["tokens"]["prompt"]
    assert [len(chunk) for chunk in segments["chunks"]] == [chunk["tokens"] for chunk in row["chunks"]]
    assert segments["lead_in"][: len(segments["prefix"])] == segments["prefix"]
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=6, do_sample=False
        )
    said = AutoTokenizer.from_pretrained(tiny).decode(out[0, len(ids) :], skip_special_tokens=True)
    assert row["answer"] == said.rstrip("\ufffd").strip()  # half a character at the end is left out


def test_compare(store: Path) -> None:
    args = ("query", QUESTION, "--store", store, *SHORT, "--compare", "reuse, epic,blend,reuse", "--json")
    row = kvtool(*args).fine().json
    assert row["reference"] == "full"
    assert [run["fusion"] for run in row["runs"]] == ["full", "reuse", "epic", "blend"]
    for run in row["runs"]:
        check_reply(run)
        assert run["kl_first"] >= 0
        assert run["kl_answer"] >= 0
        assert type(run["top1_agrees"]) is type(run["answer_equal"]) is bool
    full, reuse = row["runs"][:2]
    assert (full["kl_first"], full["kl_answer"], full["answer_equal"]) == (0, 0, True)
    assert reuse["kl_first"] > 0
    alone = kvtool("query", QUESTION, "--store", store, *SHORT, "--json", "--fusion", "reuse").fine().json
    assert alone["answer"] == reuse["answer"]


def test_batch(store: Path, tmp_path: Path) -> None:
    chunks = chunks_of(store, "mill4.md")
    batch = write_batch(
        tmp_path / "b.jsonl",
        {"id": "a", "question": QUESTION, "answers": ["the third", "nobody"]},
        {"id": 2, "question": "When?", "documents": ["mill1.md", "mill0.md"]},
        {"question": "When?", "chunks": [chunks[1], chunks[0]], "answers": ["1824"]},
    )
    *rows, summary = kvtool("query", "--batch", batch, "--store", store, *SHORT).fine().lines
    assert [row.get("id") for row in rows] == ["a", "2", None]
    for row, retrieved in zip(rows, (True, False, False), strict=True):
        assert row["schema"] == 1
        check_reply(row, retrieved)
    asked = chunks_of(store, "mill1.md") + chunks_of(store, "mill0.md")
    assert [chunk["id"] for chunk in rows[1]["chunks"]] == asked
    assert [chunk["id"] for chunk in rows[2]["chunks"]] == [chunks[1], chunks[0]]
    assert {"f1", "exact_match", "contains"} <= set(rows[0])
    assert "f1" not in rows[1]
    assert summary["type"] == "summary"
    assert summary["count"] == 3
    assert summary["ttft_ms_median"] > 0
    assert summary["f1"] == pytest.approx((rows[0]["f1"] + rows[2]["f1"]) / 2)


def test_batch_compare(store: Path, tmp_path: Path) -> None:
    batch = write_batch(tmp_path / "b.jsonl", {"id": "a", "question": QUESTION, "answers": ["x"]}, {"question": "mill"})
    *rows, summary = kvtool("query", "--batch", batch, "--store", store, *SHORT, "--compare", "reuse,epic").fine().lines
    expected = ["full", "reuse", "epic"]
    assert len(rows) == 2
    for row in rows:
        assert row["reference"] == "full"
        assert [run["fusion"] for run in row["runs"]] == expected
        for run in row["runs"]:
            check_reply(run)
    assert rows[0]["id"] == "a"
    assert summary["type"] == "summary"
    assert [run["fusion"] for run in summary["runs"]] == expected
    for run in summary["runs"]:
        assert run["count"] == 2
        assert {"kl_first", "kl_answer", "top1_agrees", "answer_equal", "f1", "ttft_ms_median"} <= set(run)


def test_a_batch_goes_on_after_a_question_that_fails(store: Path, tmp_path: Path) -> None:
    batch = write_batch(
        tmp_path / "b.jsonl",
        {"id": "bad", "question": "mill", "documents": ["nowhere.txt"]},
        {"id": "none", "question": "zzyzx"},
        {"id": "good", "question": QUESTION},
    )
    bad, none, good, summary = kvtool("query", "--batch", batch, "--store", store, *SHORT).fine(3).lines
    assert (bad["type"], bad["id"], bad["error"]["exit_code"]) == ("error", "bad", 2)
    assert (none["type"], none["id"], none["error"]["exit_code"]) == ("error", "none", 1)
    check_reply(good)
    assert (summary["count"], summary["failed"]) == (1, 2)


def test_several_chunks_and_documents_after_one_flag(store: Path) -> None:
    """`--chunks ID…`, `--documents PATH…`, before and after the question; the flag may be repeated, too."""
    one, two = chunks_of(store, "mill4.md")[:2]
    args = ("--store", store, *SHORT, "--json")
    for words in (
        ("When?", "--chunks", two, one),
        ("--chunks", two, one, "When?"),
        ("When?", "--chunks", two, "--chunks", one),
        ("--chunks", two, "--chunks", one, "When?"),
        ("--chunks", two[:8], one, "--", "When?"),
    ):
        row = kvtool("query", *args, *words).fine().json
        assert row["question"] == "When?"
        assert [chunk["id"] for chunk in row["chunks"]] == [two, one]
    row = kvtool("query", *args, "--documents", "mill1.md", "mill0.md", "When?").fine().json
    assert [chunk["id"] for chunk in row["chunks"]] == chunks_of(store, "mill1.md") + chunks_of(store, "mill0.md")


def test_verify(store: Path) -> None:
    row = kvtool("store", "verify", "--store", store, "--json").fine().json
    count = sum(len(document["chunks"]) for document in listing(store)) + 1
    assert row["records"] == count * LAYERS
    assert row["damaged"] == []
    assert row["repaired"] == 0
    assert row["bytes"] > 0
    chunk = chunks_of(store, "mill0.md")[0]
    break_record(store, chunk, 2)
    done = kvtool("store", "verify", "--store", store, "--json")
    assert done.code == 13
    (row,) = done.json["damaged"]
    assert "digest" in row.pop("reason")
    assert row == {"kind": "records", "chunk": chunk, "level": "raw", "layer": 2}
    before = files_below(store)
    assert kvtool("store", "verify", "--store", store, "--sample", "1/7", "--json").json["sample"] == "1/7"
    assert files_below(store) == before


def test_stdout_holds_the_answer_alone(store: Path) -> None:
    reply = kvtool("query", QUESTION, "--store", store, *SHORT, "--json").fine().json
    human = kvtool("query", QUESTION, "--store", store, *SHORT).fine()
    assert human.out.strip() == "".join(filter(str.isprintable, reply["answer"]))
    assert "first token after" in human.err
    quiet = kvtool("query", QUESTION, "--store", store, *SHORT, "--quiet").fine()
    assert quiet.out == human.out
    assert quiet.err == ""
    wordy = kvtool("query", QUESTION, "--store", store, *SHORT, "-v").fine()
    assert wordy.out == human.out
    assert "mill2.md" in wordy.err


@pytest.mark.slow
def test_quiet_ingest(tiny: Path, tmp_path: Path) -> None:
    """Nothing but errors; in a process of its own, where libraries would draw bars."""
    corpus = write_corpus(tmp_path / "in", 1)
    args = ("ingest", corpus, "--model", tiny, *CHUNKS, *PREFIX)
    done = process(*args, "--store", tmp_path / "quiet", "-q").fine()
    assert (done.out, done.err) == ("", "")
    done = process(*args, "--store", tmp_path / "human").fine()
    assert done.out.startswith("documents: 1 added")
    assert "%|" not in done.err


def test_jsonl(store: Path, tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_text("A new mill.")
    (tmp_path / "odd.txt").write_bytes(b"\0\1\2\3")
    args = (tmp_path / "new.txt", tmp_path / "odd.txt", "--store", store, "--jsonl")
    events = kvtool("ingest", *args).fine(3).lines
    assert {event["type"] for event in events} <= {"status", "warning", "error", "summary"}
    assert all(event["schema"] == 1 for event in events)
    assert events[-1]["type"] == "summary"
    assert events[-1]["documents"]["added"] == 1
    assert any(event["type"] == "warning" and "odd.txt" in event["message"] for event in events)
    (error,) = kvtool("query", "zzyzx", "--store", store, "--jsonl").lines
    assert (error["type"], error["error"]["exit_code"]) == ("error", 1)


def test_the_python_api_gives_the_same(store: Path, tmp_path: Path) -> None:
    row = kvtool("query", QUESTION, "--store", store, "--fusion", "epic", *SHORT, "--json").fine().json
    with package.open(store) as cache:
        reply = cache.query(QUESTION, fusion="epic", max_tokens=4)
        assert reply.answer == row["answer"]
        assert reply.tokens == row["tokens"]
        assert reply.bytes_read == row["bytes_read"]
        assert set(reply.timing_ms) == set(row["timing_ms"])
        (tmp_path / "new.txt").write_text("The seventh mill stands here.")
        assert cache.ingest([tmp_path / "new.txt"]).documents.added == 1
        assert cache.query("seventh", max_tokens=2).chunks[0].source.endswith("new.txt")
    with refused(package.KvtoolError):
        package.open(tmp_path / "nowhere").query("x")
