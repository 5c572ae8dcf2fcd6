"""`query --explain`, `--profile` and what a batch holds in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.core.fusion.loader import StoreSource
from kvtool.core.fusion.plan import Candidate, Plan, Segment
from kvtool.core.query.explain import explain
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
