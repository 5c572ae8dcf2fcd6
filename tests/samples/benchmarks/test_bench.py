"""`samples.benchmarks.bench` says what it measured; how fast that was is no test's business."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.record import OVERHEAD_BYTES
from kvtool.core.cache.store import Store
from samples.benchmarks.bench import codec
from tests.cli.working import LAYERS, damages, kvtool, listing
from tests.samples.benchmarks.benching import run_bench

KV_HEADS, HEAD_DIM = 2, 16  # of the tiny model


def test_bench_ingest_measures_the_stores_own_chunks_and_leaves_the_store_alone(store: Path) -> None:
    before = listing(store)
    row = run_bench("ingest", "--store", store, "--tokens", "300", "--repeat", "1", "--json").fine().json
    assert 0 < row["chunks"] <= len({chunk["id"] for document in before for chunk in document["chunks"]})
    assert row["tokens"] > 0
    assert row["plain_tokens_per_second"] > 0
    assert row["ingest_tokens_per_second"] > 0
    ratio = row["ingest_tokens_per_second"] / row["plain_tokens_per_second"]
    assert row["speedup"] == pytest.approx(ratio)  # one round: no medians
    assert listing(store) == before
    assert not damages(store)


def bench_codec(store: Path, *more: object) -> dict[str, Any]:
    return run_bench("codec", "--store", store, "--repeat", "1", "--json", *more).fine().json


def sizes(path: Path, level: str, tokens: int) -> tuple[int, int]:
    """Tokens, and bytes of the records of a level, of a store's first chunks with about `tokens` tokens."""
    read = size = 0
    with Store.open(path) as store:
        for chunk in store.chunk_ids():
            info = store.chunk_info(chunk)
            if level not in store.levels(chunk) or info is None:
                continue
            if read and read + len(info.token_ids) > tokens:
                break
            read += len(info.token_ids)
            for layer in range(LAYERS):
                record = store.read_kv(chunk, level, layer)
                assert record is not None
                size += len(record[1]) + OVERHEAD_BYTES
    return read, size


def test_bench_codec_measures_what_the_store_would_be_compressed_to(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "NESTED", ("2", "4"))
    with Store.open(store) as opened:
        first = [part for chunk in opened.chunk_ids()[:6] for part in ("--chunks", chunk.hex())]
    kvtool("compress", "--store", store, "--fit-prompts", "2", "--questions", "0", "--level", "2", *first).fine()
    before = listing(store)
    found = bench_codec(store, "--tokens", "200", "--threads", "2")
    assert 1 < found["chunks"] < 6
    assert listing(store) == before
    assert not damages(store)
    assert found["profile"] is not None
    rows = {(row["what"], row["level"], row["threads"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"])
    tokens, size = sizes(store, "2", 200)
    assert tokens == found["tokens"]
    raw_bytes = 4 * LAYERS * KV_HEADS * HEAD_DIM * tokens
    for threads in (1, 2):
        for what in ("encode", "decode"):
            row = rows[what, "2", threads]
            # A single level is stored without others, so these are `compress`'s records: of the float32 numbers.
            assert row["bytes"] == pytest.approx(size, rel=0.001)
            assert row["bits_per_element"] == pytest.approx(16 * row["bytes"] / raw_bytes)
        assert {row["raw_bytes"] for row in rows.values()} == {raw_bytes}
        assert rows["encode", "lossless", threads]["bytes"] == rows["decode", "lossless", threads]["bytes"]
    assert all(row["gb_per_s"] > 0 for row in rows.values())
    assert rows["memcpy", None, 1]["bits_per_element"] == 16
    beside = {"memcpy", "zstd -1 compress", "zstd -1 decompress"}
    assert {what for what, level, _ in rows if level is None} == beside
