"""Bytes that windows spare are reported, next to those that are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import kvtool
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import RAW
from kvtool.core.records.read import read_records
from tests.cli.working import CHUNKS, LAYERS, PREFIX, QUESTION, SHORT, write_corpus
from tests.cli.working import kvtool as command
from tests.families import save_tiny

REUSE = ("--fusion", "reuse", "--top-k", "8", *SHORT)


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a tiny Gemma 2, three of whose four layers see 32 tokens; leave it as it is."""
    folder = tmp_path_factory.mktemp("spared")
    save_tiny("gemma2", folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTOOL_HOME", str(folder / "home"))
        at = ("--store", folder / "store", "--model", folder / "model", *CHUNKS, *PREFIX)
        command("ingest", write_corpus(folder / "corpus"), *at).fine()
        command(
            "compress", "--fit", "--level", "1", "--level", "2", "--store", folder / "store", "--questions", "0"
        ).fine()
    return folder / "store"


@pytest.fixture
def store(ingested: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ingested, tmp_path / "store"))


def taken(store: Store, chunk_id: bytes, level: str) -> list[int]:
    """Bytes that reading each layer takes, what it refines included."""
    records = [read_records(store, [chunk_id], level, layer)[0] for layer in range(LAYERS)]
    return [sum(len(one.payload) for one in record.chain()) for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("level", [RAW, "1", "2"])
def test_read_and_spared_are_all_that_there_is(level: str, store: Path) -> None:
    with kvtool.open(store) as cache:
        reply = cache.query(QUESTION, fusion="reuse", level=level, top_k=8, max_tokens=4)
    segments = reply.fused.plan.cached
    assert {segment.source.level for segment in segments} == {level, RAW}
    with Store.open(store) as opened:
        sizes = {one.source.chunk_id: taken(opened, one.source.chunk_id, str(one.source.level)) for one in segments}
        for one in segments:
            assert opened.payload_sizes(one.source.chunk_id, str(one.source.level)) == sizes[one.source.chunk_id]
        assert opened.payload_sizes(segments[0].source.chunk_id, "4") == []
    assert 0 < reply.bytes_read < reply.bytes_spared
    assert reply.bytes_read + reply.bytes_spared == sum(map(sum, sizes.values()))
    row = reply.to_json()
    assert row["bytes_spared"] == reply.bytes_spared
    assert row["records_read"] + row["records_spared"] == LAYERS * len(segments)


def test_it_is_told(store: Path) -> None:
    done = command("query", QUESTION, "--store", store, *REUSE, "-v", "--json").fine()
    spared, size = done.json["records_spared"], done.json["bytes_spared"] / 1e6
    assert f"{spared} more, {size:.1f} MB, that no row sees through its window" in done.err
    all_of_it = command("query", QUESTION, "--store", store, "--fusion", "union", *SHORT, "-v", "--json").fine()
    if not all_of_it.json["records_spared"]:
        assert "that no row sees" not in all_of_it.err


def test_a_batch_that_holds_what_it_read(store: Path, tmp_path: Path) -> None:
    """What was never read is not in memory: it is spared once more."""
    (tmp_path / "b.jsonl").write_text(2 * (json.dumps({"question": QUESTION}) + "\n"))
    done = command("query", "--batch", tmp_path / "b.jsonl", "--store", store, *REUSE, "--json").fine()
    first, again = (row for row in done.lines if "answer" in row)
    assert first["bytes_spared"] == again["bytes_spared"] > 0
    assert again["bytes_read"] == 0
