"""Rows, tables and the chart of `peers.py`, from invented measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtool.core.checkpoint.files import ModelFiles
from kvtool.core.query.options import QueryOptions
from samples.benchmarks.systems.job import Found, PeersOptions, Run, llama_contenders, runs
from samples.benchmarks.systems.rows import PeersBench, gathered
from samples.benchmarks.systems.task import (
    KVTOOL,
    LLAMA,
    LLAMA_DEFAULT,
    PEERS,
    TRANSFORMERS,
    Contender,
    Measured,
    Saved,
)

TRIED = [
    {"ubatch": 128, "flash": "on", "prefill_ms": 90.0},
    {"ubatch": 128, "flash": "off", "prefill_ms": 95.0},
    {"ubatch": 512, "flash": "on", "prefill_ms": 100.0},
    {"ubatch": 512, "flash": "off", "prefill_ms": 85.0},
]
STORED = [{"level": "raw", "bytes_per_token": 23050.5}, {"level": "2", "bytes_per_token": 1720.0}]
MODES = ("full", "union", "epic", "reuse")
_TTFT = {"full": 400.0, "union": 200.0, "epic": 100.0, "reuse": 50.0}  # milliseconds of 1,000 tokens


def options(contexts: Sequence[int] = (1000,), repeat: int = 2) -> PeersOptions:
    """Options of a run; everything else is as small as can be."""
    sizes = {"question_tokens": 32, "chunk_tokens": 256, "new_tokens": 4, "threads": 1}
    given = {"model": "tiny", "dtype": "auto", "offline": False, "level": "raw", "query": QueryOptions()}
    return PeersOptions(peers=PEERS, modes=MODES, contexts=tuple(contexts), repeat=repeat, **sizes, **given)


def contenders() -> list[Contender]:
    ours = (Contender(KVTOOL, mode=mode) for mode in MODES)
    return [*llama_contenders(TRIED), Contender(TRANSFORMERS), *ours]


def measured(contender: Contender, context: int = 1000, late: float = 0.0) -> Measured:
    """What one process might have found; a round that was `late` took so many milliseconds more."""
    llama = contender.kind == LLAMA
    base = 1000.0 + contender.ubatch if llama else _TTFT.get(contender.mode, 500.0)
    return Measured(
        import_ms=100.0,
        model_load_ms=200.0,
        warm_ms=30.0,
        ttft_ms=base * context / 1000 + late,
        ttft_cpu_ms=base,
        decode_ms=40.0 if contender.flash != "off" else 20.0,
        base_bytes=40_000_000,
        loaded_bytes=170_000_000,
        peak_bytes=180_000_000,
        mapped_bytes=120_000_000,
        ids=(7, 8, 9, 5, 4) if llama else (7, 8, 9, 6, 4),
        version="1.0",
        build="AVX2 = 1",
        saved=Saved(23_000 * context, context - 32, 12.0, 80.0 + late) if llama else None,
        bytes_read=1000 if contender.kind == KVTOOL else None,
        flops={"full": 1000, "union": 250, "epic": 125, "reuse": 50}.get(contender.mode),
    )


@pytest.fixture
def bench() -> PeersBench:
    asked = options(contexts=(1000, 4000), repeat=3)
    made = [
        Run(contender, context, number, measured(contender, context, late))
        for context in asked.contexts
        for contender in contenders()
        for number, late in enumerate((0.0, 9.0, 1.0))
    ]
    files = ModelFiles("tiny", Path(), "folder")
    return gathered(Found(files, "float32", tuple(made), {}, tuple(STORED), {"context": 1000, "rows": TRIED}), asked, 2)


def test_llama_cpp_runs_as_it_comes_and_with_the_quickest_settings_with_and_without_flash_attention() -> None:
    found = llama_contenders(TRIED)
    assert [(one.ubatch, one.flash) for one in found] == [(512, "auto"), (128, "on"), (512, "off")]
    assert [one.name for one in found] == [LLAMA_DEFAULT, "llama.cpp, -ub 128 -fa on", "llama.cpp, -ub 512 -fa off"]
    assert runs(options(repeat=2)) == 2 * len(contenders())


def test_times_are_medians_and_speeds_follow_from_them(bench: PeersBench) -> None:
    rows = {(row.contender, row.context): row for row in bench.rows}
    full, union = rows["kvtool full", 1000], rows["kvtool union", 1000]
    assert (full.count, full.ttft_ms) == (3, 401.0)
    assert full.prefill_tokens_per_second == pytest.approx(1000 / 0.401)
    assert full.decode_tokens_per_second == pytest.approx(4 / 0.04)
    quickest = rows["llama.cpp, -ub 128 -fa on", 1000].ttft_ms
    assert union.speedup == pytest.approx(quickest / 201.0)
    assert union.efficiency == pytest.approx((401.0 / 201.0) / (1000 / 250))
    assert rows["transformers", 1000].efficiency is None
    assert rows["transformers", 1000].flops is None


def test_a_saved_state_stands_with_its_contender(bench: PeersBench) -> None:
    row = next(row for row in bench.rows if row.kind == LLAMA and row.context == 4000)
    assert row.saved is not None
    assert row.saved["ttft_ms"] == 81.0
    assert row.saved["bytes_per_token"] == pytest.approx(23_000 * 4000 / 3968)
    assert all(row.saved is None for row in bench.rows if row.kind != LLAMA)


def test_tokens_are_compared_with_those_of_kvtools_full_prefill(bench: PeersBench) -> None:
    assert {row.kind: row.same_tokens for row in bench.rows} == {"llama.cpp": 3, "transformers": 5, "kvtool": 5}
