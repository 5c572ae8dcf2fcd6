"""Scripts of one file: each measures something tiny, and compares what it measures with the right answer."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samples.benchmarks import decoding, serve_load
from samples.benchmarks.peak_memory import own_pages, peak_memory
from samples.benchmarks.systems import child
from tests.cli.working import script
from tests.serve.conftest import KEY, Served, built, ready, served, tiny

__all__ = ["built", "ready", "served", "tiny"]


def test_decoding_several_sequences_at_once() -> None:
    shape = ("--shape", "tiny", "--dtype", "float32", "--context", "40", "--new-tokens", "3")
    found = script(decoding.main, *shape, "--sequences", "2,5,2", "--json").fine().json
    assert [(row["sequences"], row["same_logits"]) for row in found["together"]] == [(1, True), (2, True), (5, True)]
    script(decoding.main, *shape, "--sequences", "0").failed(2, "--sequences")


def test_recall_of_the_paragraph_that_answers(tmp_path: Path) -> None:
    paragraphs = [["nice", ["nice runs a program with modified scheduling priority."]], ["cat", ["cat joins files."]]]
    row = {"_id": "1", "question": "Which priority is modified by nice?", "answer": "scheduling"}
    row |= {"context": paragraphs, "supporting_facts": [["nice", 0]]}
    (tmp_path / "in.json").write_text(json.dumps([row]), "utf-8")
    command = [sys.executable, "samples/benchmarks/recall.py", "hotpotqa", str(tmp_path / "in.json"), "--found", "1"]
    assert "1 questions: recall@1 1.0000" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_serve_load_counts_wrong_answers_and_errors(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    place = (host, int(port), KEY)
    asked = ["Who built the third mill?", "Who built the first mill?"]
    expected = {one.question: one.text for one in serve_load.measure(place, 1, [asked]).told}
    together = serve_load.measure(place, 3, [asked, asked[::-1], [*asked, ""]])
    assert [error.startswith("RuntimeError: 400") for error in together.errors] == [True]
    assert together.row(3, expected).split(" | ")[:4] == ["| 3", "7", "1", "0"]
    assert together.row(3, expected | {asked[0]: "another"}).split(" | ")[3] == "3"


@pytest.mark.skipif(own_pages() is None, reason="no /proc here")
def test_peak_of_memory_that_is_given_back() -> None:
    with peak_memory("cpu") as peak:
        still = torch.ones(2**25)  # 128 MiB
    assert peak.bytes is not None
    assert peak.bytes >= 0.9 * still.nbytes


@pytest.mark.skipif(child.resident() is None, reason="no /proc here")
def test_peak_begins_anew() -> None:
    size = 2**26
    with mmap.mmap(-1, size) as held:  # an allocator may keep what is freed
        held.write(b"x" * size)
        before = child.peak_resident()
    child.reset_peak()
    after = child.peak_resident()
    assert before is not None
    assert after is not None
    assert after <= before - size // 2
