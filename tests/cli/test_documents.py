"""A folder of documents in every format: ingested, found, cited by page or line, and shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.core.query.retrieve import find_chunks
from kvtool.core.retrieval.finder import Finder
from tests.cli.working import PREFIX, SHORT, Done, kvtool
from tests.families import save_tiny
from tests.support import documents


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[documents.Asked]]:
    folder = tmp_path_factory.mktemp("office").resolve()
    return folder, documents.write(folder)


@pytest.fixture(scope="module")
def store(asked: tuple[Path, list[documents.Asked]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("store")
    model = save_tiny("llama", home / "tiny")
    limits = ("--chunk-tokens", "96", "--read-timeout", "10m")
    done = kvtool("ingest", asked[0], "--store", home / "kv", "--model", model, *limits, *PREFIX, "--json").fine().json
    assert done["failures"] == []
    assert not any(done["skipped"].values())
    return home / "kv"


@pytest.mark.slow
def test_every_question_finds_the_place_of_its_answer(asked: tuple[Path, list[documents.Asked]], store: Path) -> None:
    with Store.open(store) as opened:
        finder = Finder(opened)
        assert {one.source: _cited(finder, opened, one, asked[0]) for one in asked[1]} == {
            one.source: one.source for one in asked[1]
        }


def _cited(finder: Finder, store: Store, one: documents.Asked, folder: Path) -> str:
    """The place of the answer in the chunks that are found for its question; it names its chunk again."""
    for hit in find_chunks(finder, Request(one.question), QueryOptions()).hits:
        document = store.document(hit.passage.source)
        at = document.text.find(one.answers[0], hit.passage.start, hit.passage.end)
        if at >= 0:
            cited = document.place(at, at + len(one.answers[0])).cite(document.source)
            assert any(named.start <= at < named.end for named in finder.places.of_chunks(cited))
            return cited.removeprefix(f"{folder}/")
    return "not found"


@pytest.mark.some(2)
@pytest.mark.parametrize(("ending", "cited"), [("pdf", " p. "), ("pptx", " slide "), ("mbox", "#2:"), ("html", ":")])
def test_an_answer_cites_its_places(
    ending: str, cited: str, asked: tuple[Path, list[documents.Asked]], store: Path
) -> None:
    one = next(one for one in asked[1] if one.file.endswith(ending))
    done = _ask(one.question, store, "-v")
    assert f"{asked[0] / one.file}{cited}" in done.err
    assert one.answers[0] in done.err
    reply = _ask(one.question, store, "--json").json
    chunk = reply["chunks"][-1]
    assert chunk["source"].startswith(str(asked[0] / one.file))
    assert (chunk["line"] is None) == bool(chunk["label"])
    assert "staleness" not in chunk
    assert any(one.answers[0] in each["text"] for each in reply["chunks"])


def _ask(question: str, store: Path, *more: object) -> Done:
    return kvtool("query", question, "--store", store, "--top-k", "2", *SHORT, *more).fine()


def test_a_chunk_by_its_place(asked: tuple[Path, list[documents.Asked]], store: Path) -> None:
    by_suffix = {Path(one.file).suffix: one for one in asked[1] if one.file.startswith("en/")}
    for suffix in (".jsonl", ".txt"):
        one = by_suffix[suffix]
        place = f"{asked[0] / one.file}:{one.source.rpartition(':')[2]}"
        row = kvtool("inspect", "chunk", place, "--store", store, "--json").fine().json
        assert one.answers[0] in row["text"]
        assert [chunk["id"] for chunk in _ask("Who?", store, "--chunks", place, "--json").json["chunks"]] == [row["id"]]
    kvtool("inspect", "chunk", f"{asked[0] / one.file}:4000", "--store", store).failed(2, "has no line")
    kvtool("inspect", "chunk", "nowhere.pdf p. 2", "--store", store).failed(2, "not in the store")
    kvtool("inspect", "chunk", "what is it", "--store", store).failed(2, "names no chunk")


@pytest.mark.slow
def test_a_source_that_has_changed_says_so(asked: tuple[Path, list[documents.Asked]], store: Path) -> None:
    one = next(one for one in asked[1] if one.file.endswith(".docx"))
    path = asked[0] / one.file
    data, status = path.read_bytes(), path.stat()
    try:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
        assert "since ingest" not in _ask(one.question, store).err  # touched, with what it held
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # of the same size, and then of the same time
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert "(changed since ingest)" in _ask(one.question, store).err
        path.write_bytes(data + b"\n")
        assert f"{path} ¶" in (said := _ask(one.question, store).err)
        assert "(changed since ingest)" in said
        path.unlink()
        assert _ask(one.question, store, "--json").json["chunks"][-1]["staleness"] == "deleted"
    finally:
        path.write_bytes(data)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
