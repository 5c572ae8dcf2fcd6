"""`samples.benchmarks.bench fusion` says what it measured; how fast that was is no test's business."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.core.fusion.selectors import MODES as ALL_MODES
from samples.benchmarks.bench import machine, prompts
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
