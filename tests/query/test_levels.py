"""Levels through the commands: stored at once, read back, said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvtool.core.cache.record import decode_record, encode_record
from kvtool.core.cache.store import Store
from kvtool.core.codec.lossless import Lossless
from kvtool.core.codec.raw import Raw
from kvtool.core.query import fill
from tests.cli.working import (
    CHUNKS,
    LAYERS,
    PREFIX,
    QUESTION,
    SHORT,
    chunks_of,
    damages,
    files_below,
    kvtool,
    write_corpus,
)


@pytest.fixture(scope="module")
def both(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same corpus at level raw and at level lossless."""
    folder = tmp_path_factory.mktemp("levels")
    write_corpus(folder / "in")
    for level in ("raw", "lossless"):
        at = ("--store", folder / level, "--model", tiny, *CHUNKS, *PREFIX)
        kvtool("ingest", folder / "in", *at, "--level", level).fine()
    return folder / "raw", folder / "lossless"


@pytest.fixture
def lossless(both: tuple[Path, Path]) -> Path:
    return both[1]


@pytest.mark.parametrize("mode", ["reuse", "epic", "blend", "prefix"])
def test_lossless_answers_as_raw_does(mode: str, both: tuple[Path, Path]) -> None:
    """The same tokens, the same answer, fewer bytes."""
    rows = [kvtool("query", QUESTION, "--store", path, "--fusion", mode, *SHORT, "--json").fine().json for path in both]
    assert rows[0]["answer"] == rows[1]["answer"]
    assert rows[0]["tokens"] == rows[1]["tokens"]
    assert 0 < rows[1]["bytes_read"] < rows[0]["bytes_read"]


def test_what_was_stored_is_what_raw_holds(both: tuple[Path, Path]) -> None:
    with Store.open(both[0]) as plain, Store.open(both[1]) as small:
        assert plain.chunk_ids() == small.chunk_ids()
        documents = {ref.chunk_id for document in small.documents() for ref in document.chunks}
        for chunk in documents:
            assert small.levels(chunk) == ["lossless"]
            for layer in range(LAYERS):
                header, data = plain.read_kv(chunk, "raw", layer)
                shape = (header.kv_heads, header.tokens, header.head_dim_k)
                sides = Lossless().decode_one(small.read_kv(chunk, "lossless", layer)[1], shape, header.dtype)
                assert b"".join(Raw().encode(*sides)) == bytes(data)


@pytest.mark.parametrize(("asked", "stored"), [("lossless", "raw"), ("raw", "lossless")])
def test_a_level_that_is_not_stored_is_computed_and_said(
    asked: str, stored: str, both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is stored stays as it is; nothing is prefilled for the store."""
    monkeypatch.setattr(fill, "prefill_chunks", None)
    path = both[stored == "lossless"]
    before = files_below(path)
    done = kvtool("query", QUESTION, "--store", path, "--level", asked, *SHORT, "--json").fine()
    assert "was computed in place" in done.err
    assert {chunk["status"] for chunk in done.json["chunks"]} == {"miss"}
    assert {chunk["reason"] for chunk in done.json["chunks"]} == {f"not stored at level {asked}"}
    assert files_below(path) == before


def test_a_level_that_there_is_not(store: Path) -> None:
    kvtool("query", QUESTION, "--store", store, "--level", "7").failed(2, "there is no level '7'", "lossless")


def test_a_payload_that_cannot_be_decoded_is_a_hole(lossless: Path, tmp_path: Path) -> None:
    """Its digest is right, so only the codec can tell."""
    path = tmp_path / "store"
    shutil.copytree(lossless, path)
    chunk = bytes.fromhex(chunks_of(path, "mill2.md")[1])
    with Store.open(path) as opened, opened.writer() as writer:
        records = []
        for layer in range(LAYERS):
            header, data = opened.read_kv(chunk, "lossless", layer)
            records.append(encode_record(chunk, header, [data[:-1] if layer == 2 else data]))
        info = opened.chunk_info(chunk)
        writer.drop_level([chunk], "lossless")
        writer.put_chunk(chunk, info, "lossless", records)
        writer.flush()
        assert decode_record(chunk, records[2])[0].layer == 2
    at = ("--store", path, "--documents", "mill2.md", *SHORT, "--json")
    row = kvtool("query", QUESTION, *at).fine().json
    assert [chunk["status"] for chunk in row["chunks"]][:3] == ["exact", "miss", "hit"]
    assert "do not fit" in row["chunks"][1]["reason"]
    again = kvtool("query", QUESTION, *at).fine().json  # stored again, as raw
    assert "miss" not in {chunk["status"] for chunk in again["chunks"]}
    assert again["answer"] == row["answer"]
    assert damages(path) == []
