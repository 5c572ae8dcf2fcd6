"""`peers.py`: kvtool and `transformers` answer the same prompt; rows of llama.cpp from invented measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.checkpoint.files import ModelFiles
from kvtool.core.query.options import QueryOptions
from samples.benchmarks import peers
from samples.benchmarks.systems import child, job
from samples.benchmarks.systems.job import Found, PeersOptions, Run, llama_contenders
from samples.benchmarks.systems.rows import gathered
from samples.benchmarks.systems.task import KVTOOL, LLAMA, PEERS, TRANSFORMERS, Contender, Measured, Saved
from tests.cli.working import script

SMALL = ("--question-tokens", 8, "--chunk-tokens", 40, "--new-tokens", 3, "--threads", 1, "--repeat", 1)
TRIED = [
    {"ubatch": 128, "flash": "on", "prefill_ms": 90.0},
    {"ubatch": 128, "flash": "off", "prefill_ms": 95.0},
    {"ubatch": 512, "flash": "on", "prefill_ms": 100.0},
    {"ubatch": 512, "flash": "off", "prefill_ms": 85.0},
]


def bench(tiny: Path, *more: object) -> dict[str, Any]:
    given = ("--model", tiny, "--peers", "transformers", *SMALL, "--json")
    return script(peers.main, *given, *more).fine().json


def test_kvtool_and_transformers_answer_the_same_ids(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs run in this process, which is faster."""

    def answer(name: str, told: dict[str, Any], threads: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(child.JOBS[name](json.loads(json.dumps(told)))))
        return found

    monkeypatch.setattr(job, "answer_of", answer)
    for module in ("child", "prepare"):
        monkeypatch.setattr(f"samples.benchmarks.systems.{module}.hold_to", lambda threads: None)
    found = bench(tiny, "--context", "120,160")
    names = ["transformers", "kvtool full", "kvtool union", "kvtool epic", "kvtool reuse"]
    assert [(row["contender"], row["context"]) for row in found["rows"]] == [(n, c) for c in (120, 160) for n in names]
    full = {row["contender"]: row for row in found["rows"] if row["context"] == 160}
    assert full["transformers"]["same_tokens"] == full["kvtool full"]["same_tokens"] == 4
    assert full["kvtool reuse"]["bytes_read"] > full["kvtool full"]["bytes_read"] == 0
    assert full["kvtool reuse"]["flops"] < full["kvtool union"]["flops"] < full["kvtool full"]["flops"]
    assert [row["level"] for row in found["stored"]][:2] == ["raw", "lossless"]


@pytest.mark.slow
def test_contenders_run_in_separate_processes(tiny: Path) -> None:
    found = bench(tiny, "--context", 120, "--fusion", "reuse")
    assert [row["contender"] for row in found["rows"]] == ["transformers", "kvtool reuse"]
    assert all(row["loaded_bytes"] is None or row["loaded_bytes"] > 10**7 for row in found["rows"])


@pytest.mark.model
def test_llama_cpp_is_measured_too(home: Path) -> None:
    """Skipped where the extra `peers` is not installed: it is built from source, which no test waits for."""
    pytest.importorskip("llama_cpp", reason="the extra `peers` is not installed")
    found = script(peers.main, "--context", 120, "--fusion", "reuse", "--peers", "llama.cpp", *SMALL, "--json")
    rows = found.fine().json["rows"]
    assert [row["kind"] for row in rows] == ["llama.cpp"] * 3 + ["kvtool"]
    for row in rows[:3]:
        assert row["saved"]["tokens"] == 112
        assert row["saved"]["bytes"] > 112 * 2 * 30 * 3 * 64 * 2


def measured(contender: Contender, late: float) -> Measured:
    """A measurement that a process could have made; a round that was `late` took so many milliseconds more."""
    llama = contender.kind == LLAMA
    base = 1000.0 + contender.ubatch if llama else {"full": 400.0, "union": 200.0}.get(contender.mode, 500.0)
    same: dict[str, Any] = {"import_ms": 100.0, "model_load_ms": 200.0, "warm_ms": 30.0, "decode_ms": 40.0}
    same |= dict.fromkeys(("base_bytes", "loaded_bytes", "peak_bytes", "mapped_bytes"), 10**8)
    return Measured(
        **same,
        ttft_ms=base + late,
        ttft_cpu_ms=base,
        ids=(7, 8, 9, 5, 4) if llama else (7, 8, 9, 6, 4),
        version="1.0",
        build="AVX2 = 1",
        saved=Saved(23_000_000, 968, 12.0, 80.0 + late) if llama else None,
        bytes_read=1000 if contender.kind == KVTOOL else None,
        flops={"full": 1000, "union": 250}.get(contender.mode),
    )


def test_rows_of_llama_cpp_with_its_defaults_and_its_fastest_settings() -> None:
    """Times are medians; speeds and the number of equal tokens follow from them and from kvtool's full prefill."""
    llama = llama_contenders(TRIED)
    assert [(one.ubatch, one.flash) for one in llama] == [(512, "auto"), (128, "on"), (512, "off")]
    contenders = [*llama, Contender(TRANSFORMERS), Contender(KVTOOL, mode="full"), Contender(KVTOOL, mode="union")]
    runs = [Run(one, 1000, n, measured(one, late)) for one in contenders for n, late in enumerate((0.0, 9.0, 1.0))]
    given: dict[str, Any] = {
        "model": "tiny",
        "dtype": "auto",
        "offline": False,
        "level": "raw",
        "query": QueryOptions(),
    }
    given |= {"question_tokens": 32, "chunk_tokens": 256, "new_tokens": 4, "threads": 1, "repeat": 3}
    asked = PeersOptions(peers=PEERS, modes=("full", "union"), contexts=(1000,), **given)
    stored = ({"level": "raw", "bytes_per_token": 23050.5}, {"level": "2", "bytes_per_token": 1720.0})
    tuning = {"context": 1000, "rows": TRIED}
    found = Found(ModelFiles("tiny", Path(), "folder"), "float32", tuple(runs), {}, stored, tuning)
    rows = {row.contender: row for row in gathered(found, asked, 2).rows}
    fastest, full, union = rows["llama.cpp, -ub 128 -fa on"], rows["kvtool full"], rows["kvtool union"]
    assert (full.count, full.ttft_ms) == (3, 401.0)
    assert full.prefill_tokens_per_second == pytest.approx(1000 / 0.401)
    assert union.speedup == pytest.approx(fastest.ttft_ms / 201.0)
    assert union.efficiency == pytest.approx((401.0 / 201.0) / (1000 / 250))
    assert rows["transformers"].efficiency is None
    assert fastest.saved is not None
    assert fastest.saved["ttft_ms"] == 81.0
    assert (fastest.same_tokens, rows["transformers"].same_tokens, full.same_tokens) == (3, 5, 5)
