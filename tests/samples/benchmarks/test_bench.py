"""`python -m samples.benchmarks.bench`: its counts of bytes, rows and FLOPs; its times are not tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.cli.app import main
from kvtool.core.cache.record import OVERHEAD_BYTES
from kvtool.core.cache.store import Store
from kvtool.core.fusion.selectors import MODES as ALL_MODES
from samples.benchmarks.bench import codec, machine, prompts
from samples.benchmarks.bench.__main__ import app
from tests.cli.working import LAYERS as STORE_LAYERS
from tests.cli.working import Done, files_below, kvtool, script

MODES = [mode for mode in ALL_MODES if mode != "full"]
LINEAR, CHANNELS, HEAD, LAYERS = 36864, 64, 64 * 512, 4  # of the tiny shape, see test_flops.py
QUESTION, LINKS = 8, 4


def bench(*args: object) -> Done:
    return script(lambda words: main(words, app, "bench"), *args, "--json").fine()


@pytest.fixture
def fusion(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Bench the tiny shape, with one thread and small copies and products."""
    torch.set_num_threads(1)
    monkeypatch.setattr(machine, "_COPIED", 2**16)
    monkeypatch.setattr(machine, "_ROWS", {"cpu": 8})
    monkeypatch.setattr(machine, "_LEAST_SECONDS", 0.0)
    sizes = ("--chunk-tokens", 40, "--question-tokens", QUESTION, "--repeat", 1, "--link-tokens", LINKS)
    return lambda *more: bench("fusion", "--shape", "tiny", "--dtype", "bfloat16", *sizes, *more).json


def test_ingest_leaves_the_store_unchanged(store: Path) -> None:
    before = files_below(store)
    row = bench("ingest", "--store", store, "--tokens", "300", "--repeat", "1").json
    assert row["speedup"] == pytest.approx(row["ingest_tokens_per_second"] / row["plain_tokens_per_second"])
    assert files_below(store) == before


def test_codec_measures_the_sizes_of_compress(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "NESTED", ("2", "4"))
    with Store.open(store) as opened:
        chunks = opened.chunk_ids()[:6]
    first = [part for chunk in chunks for part in ("--chunks", chunk.hex())]
    kvtool("compress", "--store", store, "--fit-prompts", "2", "--questions", "0", "--level", "2", *first).fine()
    before = files_below(store)
    found = bench("codec", "--store", store, "--repeat", "1", "--tokens", "200", "--threads", "2").json
    assert files_below(store) == before
    rows = {(row["what"], row["level"], row["threads"]): row for row in found["rows"]}
    with Store.open(store) as opened:
        compressed = [chunk for chunk in opened.chunk_ids() if "2" in opened.levels(chunk)][: found["chunks"]]
        records = [opened.read_kv(chunk, "2", layer) for chunk in compressed for layer in range(STORE_LAYERS)]
    size = sum(len(record[1]) + OVERHEAD_BYTES for record in records if record is not None)
    raw_bytes = 4 * STORE_LAYERS * 2 * 16 * found["tokens"]
    for threads in (1, 2):
        for what in ("encode", "decode"):
            row = rows[what, "2", threads]
            # A single level is stored without others, so these are `compress`'s records: of the float32 numbers.
            assert row["bytes"] == pytest.approx(size, rel=0.001)
            assert row["bits_per_element"] == pytest.approx(16 * row["bytes"] / raw_bytes)
            assert row["raw_bytes"] == raw_bytes
    assert {"memcpy", "zstd -1 compress", "zstd -1 decompress"} == {what for what, level, _ in rows if level is None}


@pytest.mark.slow
def test_decode_has_both_steppers() -> None:
    sizes = ("--context", "40", "--new-tokens", "3", "--threads", "1")
    found = bench("decode", "--shape", "tiny", "--dtype", "float32", *sizes).json
    assert [row["stepper"] for row in found["rows"]] == ["native", "torch"]
    assert found["weights_bytes"] == 4 * (LAYERS * LINEAR + HEAD)
    assert found["kl_max"] < 1e-9


def test_fusion_has_a_row_for_each_mode_and_context(fusion: Any, home: Path) -> None:
    found = fusion("--context", "160,200", "--context", 120)
    rows = [(row["fusion"], row["context"]) for row in found["rows"]]
    assert rows == [(mode, context) for context in (160, 200, 120) for mode in MODES]
    full = {one["context"]: min(one["transformers_ms"], one["kvtool_ms"]) for one in found["references"]}
    for row in found["rows"]:
        assert row["full_ms"] == full[row["context"]]
        assert row["speedup"] == pytest.approx(row["full_ms"] / row["ttft_ms"])
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["flops_ratio"])
        assert row["limit_ms"] == max(row["compute_limit_ms"], row["load_limit_ms"])
        assert row["rows_total"] == sum(row["rows_by_layer"])
        assert row["kv_bytes"] == 2 * LAYERS * 2 * 16 * 2 * row["context"]
        assert row["bytes_read"] > 0
    assert not list((home / "cache").glob("kvtool-bench-*"))


def by_hand(rows_and_keys: list[tuple[int, int]]) -> int:
    return sum(2 * rows * LINEAR + 4 * CHANNELS * keys for rows, keys in rows_and_keys) + 2 * HEAD


def keys_of(positions: range) -> int:
    return sum(position + 1 for position in positions)


@pytest.mark.slow
def test_fusion_counts_flops_as_by_hand(fusion: Any) -> None:
    found = fusion("--context", 120, "--fusion", "full,reuse,epic,prefix,infoflow", "--ratio", 0.1)
    rows = {row["fusion"]: row for row in found["rows"]}
    full, prefix = by_hand([(120, keys_of(range(120)))] * LAYERS), prompts.PREFIX_TOKENS
    question = (QUESTION, keys_of(range(112, 120)))
    links = sum(keys_of(range(start, start + LINKS)) for start in (prefix, prefix + 40))  # 80 tokens: two chunks
    assert {mode: rows[mode]["flops"] for mode in ("full", "reuse", "epic", "prefix")} == {
        "full": full,
        "reuse": by_hand([question] * LAYERS),
        "epic": by_hand([(question[0] + 2 * LINKS, question[1] + links)] * LAYERS),
        "prefix": by_hand([(120 - prefix, keys_of(range(prefix, 120)))] * LAYERS),
    }
    assert rows["reuse"]["flops_ratio"] == pytest.approx(full / rows["reuse"]["flops"])
    # 8 rows of 80, wherever they are, and the question twice in every layer but the last
    bounds = [
        by_hand([question] * (LAYERS - 1) + [(question[0] + 8, question[1] + keys_of(keys))] * LAYERS)
        for keys in (range(prefix, prefix + 8), range(104, 112))
    ]
    assert bounds[0] <= rows["infoflow"]["flops"] <= bounds[1]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["lossless", "2"])
def test_fusion_over_a_compressed_level(fusion: Any, level: str) -> None:
    (row,) = fusion("--context", 400, "--fusion", "reuse", "--level", level)["rows"]
    assert 0 < row["bytes_read"] < row["kv_bytes"]
    assert row["decode_ms"] > 0


@pytest.mark.slow
def test_fusion_over_a_stores_own_chunks(store: Path) -> None:
    before = files_below(store)
    done = bench("fusion", "--store", store, "--repeat", 1, "--fusion", "reuse,union", "--context", "2000,100000")
    assert [row["fusion"] for row in done.json["rows"]] == ["reuse", "union"] * len(done.json["references"])
    assert done.json["rows"][0]["context"] <= 2000
    assert "100000 were asked for" in done.err
    assert files_below(store) == before
