"""What an answer rests on: `--explain` shows recomputed tokens, `--cite` the sentences of passages; and a timeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtool as package
from kvtool.core.cache.store import Store
from kvtool.core.fusion.plan import Candidate, Plan, Segment
from kvtool.core.fusion.source import StoreSource
from kvtool.core.query.explain import explain, sentences_of
from kvtool.core.query.reply import Request, marked
from tests.cli.working import QUESTION, SHORT, chunks_of, drop_records, kvtool, write_batch

REASONS = {"full": "full recompute", "prefix": "after the exact prefix", "epic": "link token", "blend": "deviation"}
REASONS |= {"infoflow": "question attention", "union": "question attention"}


def ask(store: Path, *more: object) -> Any:
    return kvtool("query", QUESTION, "--store", store, "--documents", "mill2.md", *SHORT, *more).fine()


@pytest.mark.some(2)
@pytest.mark.parametrize("mode", [*REASONS, "reuse"])
def test_every_recomputed_token_has_a_reason(mode: str, store: Path) -> None:
    row = ask(store, "--fusion", mode, "--explain", "--json").json
    counted = 0
    for chunk in row["chunks"]:
        runs = chunk["explanation"]["spans"]
        assert [run["token_start"] for run in runs] == [0, *(run["token_end"] for run in runs[:-1])]
        assert runs[-1]["token_end"] == chunk["tokens"]
        by_reason = chunk["explanation"]["reasons"]
        assert set(by_reason) <= {REASONS.get(mode)}
        assert sum(run["token_end"] - run["token_start"] for run in runs if run["reason"]) == sum(by_reason.values())
        counted += sum(by_reason.values())
    outside = len(ask(store, "--token-ids", "--json").json["segments"]["prefix"]) if mode == "full" else 0
    assert counted + outside == row["tokens"]["recomputed"]


def test_holes_are_said_and_text_is_shown(store: Path) -> None:
    drop_records(store, chunks_of(store, "mill2.md")[1])
    done = ask(store, "--fusion", "epic", "--link-tokens", 3, "--explain")
    assert "tokens recomputed (3 for link token)" in done.err
    assert " for hole)" in done.err
    assert "[" in done.err  # no colours into a pipe
    assert "\x1b" not in done.err
    assert "tokens recomputed" not in done.out


class _Bytes:
    """A tokenizer of bytes: characters beyond ASCII are several tokens."""

    def decode(self, ids: tuple[int, ...], **kwargs: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")


def test_a_character_is_never_cut() -> None:
    text = "가나 x다"
    ids = tuple(text.encode())
    segments = [Segment((), 0, "exact", Candidate(())), Segment(ids, 0, "hit", Candidate(ids, b"chunk"))]
    plan = Plan((*segments, Segment((1,), len(ids), "fresh", Candidate((1,)))))
    rows = torch.zeros(plan.length, dtype=torch.bool)
    rows[4] = rows[7] = True  # inside of the second character; the x
    fused: Any = type("F", (), {"plan": plan, "reasons": {"deviation": rows}})
    (found,) = explain(fused, _Bytes())
    spans = [(run.text, run.reason) for run in found.spans]
    assert spans == [("가", ""), ("나", "deviation"), (" ", ""), ("x", "deviation"), ("다", "")]
    assert found.recomputed == {"deviation": 2}  # one of three bytes of a character, and the x


def test_a_timeline(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.json"
    monkeypatch.setenv("KVTOOL_TIMELINE", str(file))
    ask(store, "--fusion", "union")
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert set(names) == {"MainThread", "kvtool-loader"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(span["dur"] >= 0 and span["ts"] >= 0 for span in spans)
    by_thread = {name: {span["name"] for span in spans if span["tid"] == thread} for name, thread in names.items()}
    assert by_thread["kvtool-loader"] == {"read and decode", "upload and rotate"}
    expected = {"import", "load model", "retrieve", "question attention", "fuse: union", "generate"}
    assert expected | {"compute to logits"} <= by_thread["MainThread"]


@pytest.mark.parametrize("name", ["", "none/t.json"])
def test_a_timeline_that_cannot_be_written(
    name: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTOOL_TIMELINE", str(tmp_path / name))
    kvtool("query", QUESTION, "--store", store).failed(2, "timeline")


@pytest.mark.parametrize(("size", "times"), [("1GB", 1), ("0", 3)])
def test_a_batch_reads_a_chunk_once(
    size: str, times: int, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = list[int](), StoreSource.read

    def counted(source: StoreSource, segment: Any, layer: int, stats: Any) -> Any:
        reads.append(layer)
        return read(source, segment, layer, stats)

    monkeypatch.setattr(StoreSource, "read", counted)
    rows = ({"question": f"{QUESTION} {n}", "documents": ["mill2.md"]} for n in range(3))
    batch = write_batch(tmp_path / "b.jsonl", *rows)
    args = ("--store", store, "--batch", batch, "--fusion", "reuse", *SHORT, "--json")
    monkeypatch.setenv("KVTOOL_SERVE_MEMORY_CACHE", size)
    lines = kvtool("query", *args).fine().lines
    assert len(reads) == times * len(set(reads))
    first, *others = (line["bytes_read"] for line in lines[:3])
    assert first > 0
    assert others == ([0, 0] if times == 1 else [first, first])


SAID = "Baker B has built it in 1769. The one of 1783 is by baker D."
GOLD = "The third mill was built in 1783 by baker D. It grinds flour."
ASKED = ("--documents", "mill2.md", "--max-tokens", "80")


def cited(store: Path, *more: object) -> list[dict[str, Any]]:
    row = kvtool("query", QUESTION, "--store", store, *ASKED, "--cite", "--json", *more).fine().json
    assert row["timing_ms"]["cite"] > 0
    found: list[dict[str, Any]] = row["citations"]
    assert row["answer"] == SAID
    with Store.open(store) as opened:
        for one in found:
            document = opened.document(one["source"])
            assert " ".join(document.text[one["start"] : one["end"]].split()) == one["text"]
            assert document.text.count("\n", 0, one["start"]) + 1 == one["line"]
    return found


@pytest.mark.some(3)
@pytest.mark.parametrize("mode", ["full", "prefix", "reuse", "epic", "blend", "infoflow", "union"])
def test_each_sentence_names_one_of_a_passage(mode: str, store: Path, says: Callable[[str], None]) -> None:
    says(SAID)
    first, second = cited(store, "--fusion", mode)
    assert SAID[first["answer_start"] : first["answer_end"]] == "Baker B has built it in 1769."
    assert SAID[second["answer_start"] : second["answer_end"]] == "The one of 1783 is by baker D."
    assert "The third mill was built in" in first["text"]
    assert second["text"] == GOLD
    assert first["number"] == 1
    assert second["number"] == 1 + (first["text"] != GOLD)


def test_it_is_shown_with_a_list(store: Path, says: Callable[[str], None]) -> None:
    says(SAID)
    out = kvtool("query", QUESTION, "--store", store, *ASKED, "--cite").fine().out
    first, second = cited(store)
    answer, *listed = out.splitlines()
    last = second["number"]
    assert answer == f"Baker B has built it in 1769. [1] The one of 1783 is by baker D. [{last}]"
    assert [line.partition(": ")[2] for line in listed] == [first["text"], second["text"]][:last]
    assert listed[-1].startswith(f"[{last}] ")
    assert listed[-1].partition(": ")[0].endswith(f"mill2.md:{second['line']}")
    plain = kvtool("query", QUESTION, "--store", store, *ASKED, "--json").fine().json
    assert "citations" not in plain


def test_rows_that_are_not_stored_are_cited_too(store: Path, says: Callable[[str], None]) -> None:
    with package.open(store) as cache:
        cache.compress("2", keep=0.5, questions=0)
    says(SAID)
    _, second = cited(store, "--level", "keep50-2")
    assert second["text"] == GOLD


def test_an_earlier_turn_is_cited(store: Path, says: Callable[[str], None]) -> None:
    says(SAID)
    with package.open(store) as cache:
        talk = cache.conversation(max_tokens=80, top_k=2, cite=True)
        first = talk.ask(Request(QUESTION, search=QUESTION))
        again = talk.ask(Request(QUESTION, search=QUESTION))
        assert not again.chunks
        assert first.citations
        assert again.citations == first.citations
        assert talk.ask("And when?").citations


def test_a_question_counts_more_than_those_before_it(store: Path, says: Callable[[str], None]) -> None:
    """They help to search, and decide where its own words do not."""
    says("It was baker C.")
    before = "Was the first mill built by baker B in 1707?"
    both = ("mill0.md", "mill1.md")

    def first(question: str) -> str:
        with package.open(store) as cache:
            request = Request(question, documents=both, search=f"{before} {question}")
            return cache.conversation(max_tokens=8, cite=True).ask(request).citations[0].text

    assert "second mill was built" in first("Who built the second mill?")
    assert first("Who was it?") == "The first mill was built in 1707 by baker B. It grinds flour."


@pytest.mark.parametrize("more", ["Indeed so.", "그렇습니다. 정말입니다."])
def test_the_question_decides_where_a_sentence_has_no_word_of_a_passage(
    more: str, store: Path, says: Callable[[str], None]
) -> None:
    says(f"It was built well. {more}")
    both = ("mill0.md", "mill1.md")
    with package.open(store) as cache:
        for documents in (both, both[::-1]):
            request = Request("Who built the second mill?", documents=documents)
            found = cache.conversation(max_tokens=200, cite=True).ask(request).citations
            assert len(found) > 1
            assert {one.number for one in found} == {1}
            assert "second mill was built" in found[0].text


def test_code_in_an_answer_has_no_number(store: Path, says: Callable[[str], None]) -> None:
    code = "```python\nbuilt = 1783\nprint(built)\n```"
    says(f"Call this:\n\n{code}\n\nIt grinds flour.")
    with package.open(store) as cache:
        reply = cache.query(QUESTION, documents=["mill2.md"], max_tokens=200, cite=True)
    shown = marked(reply.answer, [asdict(one) for one in reply.citations])
    assert code in shown
    assert shown.startswith("Call this: [1]\n")
    assert shown.endswith("It grinds flour. [1]")


def test_tables_are_cited_by_line() -> None:
    table = "| mill | year |\n|---|---|\n| first | 1707 |\n| second | 1741 |\n"
    text = f"Years:\n\n{table}\n```\nx = 1\n```\n"
    cut = [text[start:end] for start, end in sentences_of(text, "markdown")]
    assert cut == ["Years:", "| mill | year |", "| first | 1707 |", "| second | 1741 |", "x = 1"]
    assert sentences_of("---\n...") == []


def test_titles_are_no_sentences() -> None:
    text = "The mill\n\nIt is old. Dr. A. Reeve built it!\n\n- one list\n- of two"
    cut = [text[start:end] for start, end in sentences_of(text)]
    assert cut == ["It is old.", "Dr. A. Reeve built it!", "- one list", "- of two"]
    assert sentences_of("The mill") == [(0, 8)]
    assert sentences_of(" \n") == []
