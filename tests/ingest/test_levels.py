"""`ingest --level`: records that are small from the start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import NO_PROFILE
from tests.cli.working import CHUNKS, PREFIX, QUESTION, SHORT, damages, kvtool, write_corpus
from tests.compress.making import chunks_in, coded_in, levels_in, prefix_of, run, state_of


@pytest.fixture
def at(tiny: Path, tmp_path: Path) -> tuple[Any, ...]:
    return ("--store", tmp_path / "store", "--model", tiny, *CHUNKS, *PREFIX)


@pytest.mark.parametrize("level", ["2", "cachegen-2", "lossless"])
def test_without_a_profile(level: str, at: tuple[Any, ...], tmp_path: Path) -> None:
    corpus, path = write_corpus(tmp_path / "in", 3, 3), tmp_path / "store"
    row = kvtool("ingest", corpus, *at, "--level", level, "--json").fine().json
    chunks = chunks_in(path)
    assert row["chunks"]["computed"] == len(chunks)
    prefix = "lossless" if level == "lossless" else "raw"
    assert levels_in(path) == {chunk: [level] for chunk in chunks} | {prefix_of(path): [prefix]}
    if level != "lossless":
        assert {coded.profile for coded in coded_in(path, level).values()} == {NO_PROFILE}
    assert row["kv_bytes"] == kvtool("store", "stats", "--store", path, "--json").json["bytes"]
    for more in (("--level", level), ()):  # another level is no reason to compute
        again = kvtool("ingest", corpus, *at, *more, "--json").fine().json
        assert (again["documents"]["unchanged"], again["chunks"]["computed"]) == (3, 0)
    assert levels_in(path)[chunks[0]] == [level]
    assert damages(path) == []
    reply = kvtool("query", QUESTION, "--store", path, *SHORT, "--json").fine().json
    assert {chunk["status"] for chunk in reply["chunks"]} <= {"hit", "exact"}


@pytest.mark.slow
def test_what_is_lost_is_told(at: tuple[Any, ...], tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "in", 2, 3)
    last = "level 3, no exact records; loss {}"
    path = tmp_path / "store"
    kvtool("ingest", write_corpus(tmp_path / "first", 1, 3), *at).fine()
    run(path, "3")
    unknown = kvtool("ingest", corpus, "--store", path, "--level", "3").fine()
    assert "the loss of level 3 is not measured here" in unknown.err
    assert unknown.out.splitlines()[-1] == last.format("not measured, 0.01 nats a token are allowed")
    digest = state_of(path)["profile"]
    for number, loss, warned in ((1, 0.002, 0), (2, 0.2, 1)):
        with Store.open(path) as store, store.writer() as writer:
            writer.set_codec_state({"profile": digest, "losses": {digest: {"3": {"kl_answer": loss}}}})
        (corpus / "new.md").write_text(f"# Mill {number}\n\nIt grinds nothing.")
        done = kvtool("ingest", corpus, "--store", path, "--level", "3").fine()
        assert done.err.count("more than the 0.01 that questions allow") == warned
        assert done.out.splitlines()[-1] == last.format(f"{loss:.4f} of at most 0.01 nats a token")
    (corpus / "new.md").write_text("# The third mill\n\nIt grinds oats.")
    exact = kvtool("ingest", corpus, "--store", path, "--json").fine()
    assert (exact.json["loss"], exact.err) == (0.0, "")


@pytest.mark.slow
def test_what_it_stores_is_what_compress_makes(at: tuple[Any, ...], tmp_path: Path) -> None:
    corpus, path = write_corpus(tmp_path / "in", 1, 3), tmp_path / "store"
    kvtool("ingest", write_corpus(tmp_path / "first", 2, 3), *at).fine()
    run(path, "2")
    shutil.copytree(path, tmp_path / "raw")
    kvtool("ingest", corpus, "--store", path, "--level", "2").fine()
    kvtool("ingest", corpus, "--store", tmp_path / "raw").fine()
    run(tmp_path / "raw", "2")
    with Store.open(path) as one, Store.open(tmp_path / "raw") as two:
        for chunk in map(bytes.fromhex, chunks_in(path)):
            assert one.read_kv(chunk, "2", 1)[1] == two.read_kv(chunk, "2", 1)[1]
