"""`peers.py`: everybody answers the same prompt; how fast they are is no test's business."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samples.benchmarks import peers
from samples.benchmarks.systems import child, job
from tests.cli.working import script

SMALL = ("--question-tokens", 8, "--chunk-tokens", 40, "--new-tokens", 3, "--threads", 1, "--repeat", 1)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs are done in this process, which is quicker; their names as they come."""
    asked: list[str] = []

    def answer(name: str, told: dict[str, Any], threads: int) -> dict[str, Any]:
        asked.append(name)
        found: dict[str, Any] = json.loads(json.dumps(child.JOBS[name](json.loads(json.dumps(told)))))
        return found

    monkeypatch.setattr(job, "answer_of", answer)
    for module in ("child", "prepare"):
        monkeypatch.setattr(f"samples.benchmarks.systems.{module}.hold_to", lambda threads: None)
    return asked


def bench(tiny: Path, *more: object) -> dict[str, Any]:
    given = ("--model", tiny, "--peers", "transformers", *SMALL, "--json")
    return script(peers.main, *given, *more).fine().json


def test_kvtool_and_transformers_answer_the_same_ids(tiny: Path, tmp_path: Path, here: list[str]) -> None:
    plot = tmp_path / "chart.svg"
    found = bench(tiny, "--context", "120,160", "--plot", plot)
    names = ["transformers", "kvtool full", "kvtool union", "kvtool epic", "kvtool reuse"]
    assert [(row["contender"], row["context"]) for row in found["rows"]] == [(n, c) for c in (120, 160) for n in names]
    assert here == ["prepare", *["measure"] * 10]
    assert (found["threads"], found["new_tokens"], found["tuning"]) == (1, 3, None)
    full = {row["contender"]: row for row in found["rows"] if row["context"] == 160}
    assert full["transformers"]["same_tokens"] == full["kvtool full"]["same_tokens"] == 4
    assert full["kvtool reuse"]["bytes_read"] > full["kvtool full"]["bytes_read"] == 0
    assert full["kvtool reuse"]["flops"] < full["kvtool union"]["flops"] < full["kvtool full"]["flops"]
    for row in found["rows"]:
        for name in ("ttft_ms", "import_ms", "model_load_ms", "warm_ms", "decode_tokens_per_second"):
            assert row[name] > 0
        assert row["speedup"] is row["saved"] is None
    assert [row["level"] for row in found["stored"]][:2] == ["raw", "lossless"]
    for baseline in (False, True):
        rows = [row for row in found["stored"] if row["level"].startswith("cachegen") is baseline]
        sizes = [row["bytes_per_token"] for row in rows]
        assert sizes == sorted(sizes, reverse=True)
    assert "<svg" in plot.read_text()


@pytest.mark.slow
def test_processes_of_their_own(tiny: Path) -> None:
    found = bench(tiny, "--context", 120, "--fusion", "reuse")
    assert [row["contender"] for row in found["rows"]] == ["transformers", "kvtool reuse"]
    assert all(row["loaded_bytes"] is None or row["loaded_bytes"] > 10**7 for row in found["rows"])


@pytest.mark.model
def test_llama_cpp_beside_them(home: Path) -> None:
    """Skipped where the extra `peers` is not installed: it is built from source, which no test waits for."""
    pytest.importorskip("llama_cpp", reason="the extra `peers` is not installed")
    found = script(peers.main, "--context", 120, "--fusion", "reuse", "--peers", "llama.cpp", *SMALL, "--json")
    rows = found.fine().json["rows"]
    assert [row["kind"] for row in rows] == ["llama.cpp"] * 3 + ["kvtool"]
    for row in rows[:3]:
        assert row["saved"]["tokens"] == 112
        assert row["saved"]["bytes"] > 112 * 2 * 30 * 3 * 64 * 2
        assert row["speedup"] <= 1
    assert len(found.json["tuning"]["rows"]) == 6
