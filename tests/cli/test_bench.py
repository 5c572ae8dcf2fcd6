"""`kvtool bench ingest` says what it measured; how fast that was is no test's business."""

from __future__ import annotations

from pathlib import Path

from tests.cli.working import damages, kvtool, listing


def test_bench_ingest_measures_the_stores_own_chunks_and_leaves_the_store_alone(store: Path) -> None:
    before = listing(store)
    row = kvtool("bench", "ingest", "--store", store, "--tokens", "300", "--repeat", "1", "--json").fine().json
    assert 0 < row["chunks"] <= len({chunk["id"] for document in before for chunk in document["chunks"]})
    assert row["tokens"] > 0
    assert row["plain"] > 0
    assert row["ingest"] > 0
    assert abs(row["ratio"] - row["ingest"] / row["plain"]) < 1e-6 * row["ratio"]  # one round: no medians
    assert listing(store) == before
    assert not damages(store)


def test_bench_needs_a_store(tmp_path: Path) -> None:
    kvtool("bench", "ingest", "--store", tmp_path / "none").failed(10)
