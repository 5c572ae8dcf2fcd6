"""Laws 6, 8 and 10 at the command: moved stores, flipped bytes, threads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvtool.core.cache import tables
from kvtool.core.cache.store import Store
from tests.cli.working import (
    CHUNKS,
    QUESTION,
    SHORT,
    break_record,
    chunks_of,
    damages,
    flip_row,
    kvtool,
    payloads,
    prefix_chunk,
    process,
)

FIELDS = ("answer", "chunks", "tokens", "bytes_read")


@pytest.mark.slow
def test_copied_and_moved_stores_answer_alike(store: Path, tmp_path: Path) -> None:
    """Law 6, one of the runs in another process."""
    args = ("query", QUESTION, *SHORT, "--json", "--store")
    expected = kvtool(*args, store).fine().json
    copy = Path(shutil.copytree(store, tmp_path / "deep" / "copy"))
    there = process(*args, copy).fine().json
    moved = kvtool(*args, store.rename(tmp_path / "moved")).fine().json
    for name in FIELDS:
        assert there[name] == moved[name] == expected[name]
    assert kvtool("store", "verify", "--store", tmp_path / "moved", "--json").fine().json["damaged"] == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reuse", "epic", "blend"])
@pytest.mark.parametrize("layer", [0, 3])
def test_a_flipped_bit_in_a_record(mode: str, layer: int, store: Path, tmp_path: Path) -> None:
    """Law 8: answered as without that cache, said, and repaired."""
    args = ("query", QUESTION, "--documents", "mill2.md", "--fusion", mode, *SHORT, "--json", "--store")
    before, whole = payloads(store), kvtool(*args, store).fine().json
    without = Path(shutil.copytree(store, tmp_path / "without"))
    chunk = chunks_of(store, "mill2.md")[1]
    with Store.open(without) as opened, opened.writer() as writer:
        writer.drop_level([bytes.fromhex(chunk)], "raw")
    expected = kvtool(*args, without).fine().json
    break_record(store, chunk, layer)
    done = kvtool(*args, store).fine()
    row = done.json
    assert row["chunks"][1]["status"] == "miss"
    assert "damaged" in row["chunks"][1]["reason"]
    assert "warning: " in done.err
    assert row["answer"] == expected["answer"]
    assert row["tokens"] == expected["tokens"]
    assert row["tokens"]["fresh"] == whole["tokens"]["fresh"] + row["chunks"][1]["tokens"]
    again = kvtool(*args, store).fine()
    assert "warning" not in again.err
    assert again.json["chunks"] == whole["chunks"]
    assert payloads(store) == before
    assert damages(store) == []


def test_a_flipped_bit_in_the_prefix(store: Path) -> None:
    args = ("query", QUESTION, "--store", store, "--fusion", "reuse", *SHORT, "--json")
    before, whole = payloads(store), kvtool(*args).fine().json
    break_record(store, prefix_chunk(store), 2)
    done = kvtool(*args).fine()
    assert "damaged" in done.err
    assert done.json["answer"] == whole["answer"]
    assert kvtool(*args).fine().json["tokens"] == whole["tokens"]
    assert payloads(store) == before


@pytest.mark.slow
@pytest.mark.parametrize("table", ["chunks", "levels"])
def test_a_flipped_bit_in_a_description(table: str, store: Path) -> None:
    """The chunk's ids come from the document's text then."""
    args = ("query", QUESTION, "--documents", "mill2.md", "--store", store, "--fusion", "reuse", *SHORT, "--json")
    before, whole = payloads(store), kvtool(*args, "--token-ids").fine().json
    chunk = bytes.fromhex(chunks_of(store, "mill2.md")[1])
    if table == "chunks":
        flip_row(store, tables.CHUNKS, chunk)
    else:
        flip_row(store, tables.LEVELS, tables.level_key(chunk, "raw"))
    done = kvtool(*args, "--token-ids").fine()
    row = done.json
    assert row["chunks"][1]["status"] == "miss"
    assert row["chunks"][1]["reason"] in done.err
    assert row["segments"] == whole["segments"]
    assert kvtool(*args).fine().json["chunks"] == whole["chunks"]
    assert payloads(store) == before
    assert damages(store) == []


def test_a_flipped_bit_in_a_document_is_healed_by_ingest(store: Path, corpus: Path) -> None:
    before = payloads(store)
    flip_row(store, tables.DOCUMENTS, tables.name_key(str(corpus / "mill2.md")))
    report = kvtool("ingest", corpus, "--store", store, "--json").fine().json
    assert report["documents"]["changed"] == 1
    assert report["chunks"]["computed"] == 0
    assert payloads(store) == before
    assert damages(store) == []


def test_a_flipped_bit_in_the_manifest(store: Path, corpus: Path, tiny: Path) -> None:
    before = payloads(store)
    flip_row(store, tables.META, tables.MANIFEST_KEY)
    for args in (("query", QUESTION), ("ingest", corpus), ("inspect",)):
        kvtool(*args, "--store", store).failed(13, "the manifest of the store is damaged", "--repair")
    kvtool("store", "verify", "--repair", "--store", store).fine()
    kvtool("query", QUESTION, "--store", store).failed(10, "ingest")
    report = kvtool("ingest", corpus, "--store", store, "--model", tiny, *CHUNKS, "--json").fine().json
    assert report["chunks"]["computed"] == 0  # what it said is said again, and all records are still good
    assert payloads(store) == before
