"""`samples.benchmarks.bench fusion` says what it measured; how fast that was is no test's business."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.core.fusion.selectors import MODES as ALL_MODES
from samples.benchmarks.bench import fusion, machine, prompts
from tests.cli.working import damages, listing
from tests.samples.benchmarks.benching import run_bench

MODES = [mode for mode in ALL_MODES if mode != "full"]
LINEAR, CHANNELS, HEAD, LAYERS = 36864, 64, 64 * 512, 4  # of the tiny shape, see test_flops.py
QUESTION, LINKS = 8, 4


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread for tiny matrices; small copies and products."""
    torch.set_num_threads(1)
    monkeypatch.setattr(machine, "_COPIED", 2**16)
    monkeypatch.setattr(machine, "_ROWS", {"cpu": 8})
    monkeypatch.setattr(machine, "_LEAST_SECONDS", 0.0)


def bench(*more: object) -> dict[str, Any]:
    sizes = ("--chunk-tokens", 40, "--question-tokens", QUESTION, "--repeat", 1)
    given = ("--shape", "tiny", "--dtype", "bfloat16", *sizes)
    return run_bench("fusion", *given, "--json", *more).fine().json


def test_the_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", "avx2 fma")
    found = bench("--context", 120, "--fusion", "reuse", "--dtype", "auto")
    host = found["host"]
    assert found["resolved"]["dtype"] == "float32"
    assert (host["cpu_features"], host["fast_bfloat16"]) == (["avx2", "fma"], False)
    assert host["held_to"]["KVTOOL_CPU_FEATURES"] == "avx2 fma"
    assert (host["threads"], host["torch"]) == (1, torch.__version__)
    assert host["cpu"]
    assert host["torch_kernels"]


def by_hand(rows_and_keys: list[tuple[int, int]]) -> int:
    return sum(2 * rows * LINEAR + 4 * CHANNELS * keys for rows, keys in rows_and_keys) + 2 * HEAD


def keys_of(positions: range) -> int:
    return sum(position + 1 for position in positions)


def test_a_row_for_each_mode_and_context(home: Path) -> None:
    found = bench("--context", "160,200", "--context", 120, "--link-tokens", LINKS)
    assert [(row["fusion"], row["context"]) for row in found["rows"]] == [
        (m, n) for n in (160, 200, 120) for m in MODES
    ]
    assert [one["context"] for one in found["references"]] == [160, 200, 120]
    assert found["shape"] == "tiny"
    assert found["resolved"]["dtype"] == "bfloat16"
    for row in found["rows"]:
        (reference,) = (one for one in found["references"] if one["context"] == row["context"])
        full = min(reference["transformers_ms"], reference["kvtool_ms"])
        assert row["full_ms"] == full
        assert row["reference"] == ("transformers sdpa" if full == reference["transformers_ms"] else "kvtool full")
        assert row["speedup"] == pytest.approx(full / row["ttft_ms"])
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["flops_ratio"])
        assert row["overlap"] == pytest.approx(row["ttft_ms"] / max(row["load_ms"], row["compute_ms"]))
        assert row["limit_ms"] == max(row["compute_limit_ms"], row["load_limit_ms"])
        assert row["roofline_efficiency"] == pytest.approx(row["limit_ms"] / row["ttft_ms"])
        assert row["rows_total"] == sum(row["rows_by_layer"])
        assert row["kv_bytes"] == 2 * LAYERS * 2 * 16 * 2 * row["context"]
        for name in ("read_ms", "decode_ms", "wait_ms", "select_ms", "plan_ms"):
            assert row[name] >= 0
        assert row["bytes_read"] > 0
    assert not list((home / "cache").glob("kvtool-bench-*"))


@pytest.mark.slow
def test_long_prompts_need_no_full_prefill() -> None:
    found = bench("--context", "120,200", "--fusion", "reuse,full", "--skip-full-above", 150)
    short, long = found["references"]
    assert short["transformers_ms"] > 0
    assert (long["transformers_ms"], long["kvtool_ms"]) == (None, None)
    assert [(row["fusion"], row["context"]) for row in found["rows"]] == [("reuse", 120), ("full", 120), ("reuse", 200)]
    last = found["rows"][-1]
    assert (last["full_ms"], last["speedup"], last["efficiency"], last["reference"]) == (None, None, None, "")
    assert last["flops_ratio"] > 1
    assert last["roofline_efficiency"] > 0
    told = run_bench("fusion", "--shape", "tiny", "--context", 120, "--skip-full-above", 0, "--repeat", 1).fine()
    assert "not measured" in told.out


@pytest.mark.slow
def test_flops_ratios_by_hand() -> None:
    found = bench(
        "--context", 120, "--fusion", "full,reuse,epic,prefix,infoflow", "--link-tokens", LINKS, "--ratio", 0.1
    )
    rows = {row["fusion"]: row for row in found["rows"]}
    full = by_hand([(120, keys_of(range(120)))] * LAYERS)
    assert rows["full"]["flops"] == full
    assert rows["full"]["flops_ratio"] == 1
    prefix = prompts.PREFIX_TOKENS
    question = (QUESTION, keys_of(range(112, 120)))
    assert rows["reuse"]["flops"] == by_hand([question] * LAYERS)
    assert rows["reuse"]["flops_ratio"] == pytest.approx(full / by_hand([question] * LAYERS))
    links = sum(keys_of(range(start, start + LINKS)) for start in (prefix, prefix + 40))  # 80 tokens: two chunks
    assert rows["epic"]["flops"] == by_hand([(question[0] + 2 * LINKS, question[1] + links)] * LAYERS)
    assert rows["prefix"]["flops"] == by_hand([(120 - prefix, keys_of(range(prefix, 120)))] * LAYERS)
    infoflow = rows["infoflow"]  # 8 rows of 80, wherever they are, and the question twice in every layer but the last
    assert infoflow["rows_by_layer"] == [QUESTION + 8] * LAYERS
    least, most = keys_of(range(prefix, prefix + 8)), keys_of(range(104, 112))
    twice = [question] * (LAYERS - 1)
    bounds = [by_hand(twice + [(question[0] + 8, question[1] + keys)] * LAYERS) for keys in (least, most)]
    assert bounds[0] <= infoflow["flops"] <= bounds[1]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["lossless", "2"])
def test_a_compressed_level_is_decoded(level: str) -> None:
    found = bench("--context", 400, "--fusion", "reuse", "--level", level)
    (row,) = found["rows"]
    assert found["level"] == level
    assert 0 < row["bytes_read"] < row["kv_bytes"]
    assert row["decode_ms"] > 0


def test_it_tells_people_what_the_times_include() -> None:
    done = run_bench("fusion", "--shape", "tiny", "--context", 120, "--repeat", 1, "--fusion", "reuse").fine()
    for said in ("full, transformers", "full, kvtool", "reuse", "page cache", "retrieval", "TFLOP/s", "memcpy"):
        assert said in done.out


@pytest.mark.slow
def test_tables_fit_a_narrow_terminal() -> None:
    done = run_bench("fusion", "--shape", "tiny", "--context", "120,200", "--repeat", 1, "--question-tokens", 8)
    tables = [block.splitlines() for block in done.fine().out.split("\n\n") if block.startswith("fusion ")]
    assert [len(table) for table in tables] == [1 + 2 * (2 + len(MODES)), *[1 + 2 * len(MODES)] * 2]
    # On a terminal rich puts a space on both sides of a cell, and one between: three a column here for two.
    assert max(len(line) + len(table[0].split()) + 3 for table in tables for line in table) <= 80
    assert all(not {"fusion", "context"} - set(table[0].split()) for table in tables)


@pytest.mark.slow
def test_a_stores_own_chunks(store: Path) -> None:
    before = listing(store)
    given = ("fusion", "--store", store, "--repeat", 1, "--fusion", "reuse,union")
    done = run_bench(*given, "--context", "2000,100000", "--json").fine()
    found = done.json
    assert found["shape"] is None
    assert [row["fusion"] for row in found["rows"]] == ["reuse", "union"] * len(found["references"])
    assert all(row["context"] <= 2000 for row in found["rows"] if row["context"] == found["references"][0]["context"])
    assert "100000 were asked for" in done.err
    assert listing(store) == before
    assert not damages(store)


def test_what_cannot_be_measured_is_refused(store: Path, tmp_path: Path) -> None:
    run_bench("fusion", "--shape", "tinny").failed(2, "did you mean 'tiny'?")
    run_bench("fusion", "--shape", "tiny", "--fusion", "reuse,magic").failed(2, "magic")
    run_bench("fusion", "--shape", "tiny", "--fusion", "auto").failed(2, "'auto' is none of full")
    run_bench("fusion", "--shape", "tiny", "--context", "12,many").failed(2, "many")
    run_bench("fusion", "--shape", "tiny", "--context", "12").failed(2, "too short")
    run_bench("fusion", "--shape", "tiny", "--context", "200000").failed(2, "131072")
    run_bench("fusion", "--shape", "tiny", "--level", "9").failed(2, "level")
    run_bench("fusion", "--store", tmp_path / "none").failed(10)
    run_bench("fusion", "--store", store, "--level", "lossless").failed(1, "lossless", "its levels: raw")
    run_bench("fusion", "--store", store, "--context", "10").failed(2, "too short")


def test_an_interruption_leaves_no_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    seen: list[Path] = []

    def interrupt(*given: object) -> None:
        seen.extend((home / "cache").glob("kvtool-bench-*"))
        raise KeyboardInterrupt

    monkeypatch.setattr(fusion, "warm_up", interrupt)
    run_bench("fusion", "--shape", "tiny", "--context", "120").failed(130, "interrupted")
    assert seen
    assert not any(folder.exists() for folder in seen)
