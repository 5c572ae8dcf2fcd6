"""`peers.py`: everybody answers the same prompt; how fast they are is no test's business."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.common.machine import cores
from samples.benchmarks import peers
from samples.benchmarks.systems import child, job
from tests.cli.working import script
from tests.samples.benchmarks.fabricated import options, write_journal

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
def test_a_run_goes_on_where_it_was_stopped(
    tiny: Path, tmp_path: Path, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, given = tmp_path / "peers.jsonl", ("--context", 120, "--fusion", "full,reuse")
    answer, left = job.answer_of, [3]

    def stopped(name: str, told: dict[str, Any], threads: int) -> dict[str, Any]:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return answer(name, told, threads)

    monkeypatch.setattr(job, "answer_of", stopped)
    whole = ("--model", tiny, "--peers", "transformers", *SMALL, *given, "--resume", file)
    assert script(peers.main, *whole).code == 130
    assert here == ["prepare", "measure", "measure"]
    left[0] = 99
    first = bench(tiny, *given, "--resume", file)
    assert here[3:] == ["prepare", "measure"]
    assert bench(tiny, *given, "--resume", file) == first  # nothing is measured again
    assert len(here) == 5
    more = bench(tiny, "--context", "120,140", "--fusion", "full,reuse", "--repeat", 2, "--resume", file)
    assert [row["count"] for row in more["rows"]] == [2] * 6
    script(peers.main, *whole, "--new-tokens", 5).failed(2, "new tokens", "--resume")


@pytest.mark.slow
def test_processes_of_their_own(tiny: Path) -> None:
    found = bench(tiny, "--context", 120, "--fusion", "reuse")
    assert [row["contender"] for row in found["rows"]] == ["transformers", "kvtool reuse"]
    assert all(row["loaded_bytes"] is None or row["loaded_bytes"] > 10**7 for row in found["rows"])


def test_a_whole_file_needs_nobody(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "peers.jsonl"
    write_journal(file, options(str(tiny), contexts=(1000, 4000)))
    given = ("--model", tiny, "--new-tokens", 4, "--threads", 1, "--repeat", 2, "--resume", file)
    done = script(peers.main, *given, "--context", "1000,4000").fine()
    for said in ("llama.cpp, defaults", "from its saved state", "kvtool union", "KB a token", "AVX2 = 1"):
        assert said in done.out


def test_what_it_refuses(tiny: Path, here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--model", tiny, *SMALL)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    script(peers.main, *given).failed(1, "llama-cpp-python", "kvtool[peers]", "--peers transformers")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    script(peers.main, *given).failed(2, "GGUF")
    script(peers.main, *given, "--threads", cores() + 1).failed(2, "--threads")
    script(peers.main, *given, "--peers", "vllm").failed(2, "vllm")
    script(peers.main, *given, "--peers", "transformers", "--context", 99999).failed(2, "2048")


def test_a_dead_process_says_how_it_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_PROGRAM", "import sys; print('no room', file=sys.stderr); sys.exit(9)")
    with pytest.raises(Exception, match="ended with 9: no room"):
        job.answer_of("measure", {}, 1)


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
