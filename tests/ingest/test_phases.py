"""An ingest stores all texts first; the KV of their chunks follows, by expected use, as far as time and space allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache import tables
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.ingest.storer import ChunkStorer
from kvtool.core.model.hf import check
from kvtool.core.query import fuse_prompt
from tests.cli.working import PREFIX, QUESTION, SHORT, chunks_of, damages, flip_row, kvtool, listing, payloads
from tests.upkeep.test_budget import bytes_in

FILES = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "in"
    made.mkdir()
    for number in range(FILES):
        (made / f"{number}.txt").write_text(f"The mill number {number} stands on the river and grinds.")
    return made


@pytest.fixture
def whole(folder: Path, fresh: Any, tmp_path: Path) -> Any:
    fresh(folder, store=tmp_path / "whole").fine()
    return payloads(tmp_path / "whole")


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.core.ingest.storer.BATCH_TOKENS", {"cpu": 1})


def without_kv(path: Path) -> int:
    found: int = kvtool("store", "stats", "--store", path, "--json").fine().json["without_kv"]
    return found


def test_texts_are_committed_before_any_chunk_is_computed(
    folder: Path, fresh: Any, one_by_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    commit, compute = Writer.commit_files, ChunkStorer._compute

    def committing(writer: Writer, files: Any, infos: Any) -> None:
        steps.extend(Path(entry.path).name for entry, _ in files)
        commit(writer, files, infos)

    def computing(storer: ChunkStorer, batch: Any) -> None:
        steps.append("compute")
        compute(storer, batch)

    monkeypatch.setattr(Writer, "commit_files", committing)
    monkeypatch.setattr(ChunkStorer, "_compute", computing)
    report = fresh(folder).fine().json
    assert steps == [f"{number}.txt" for number in range(FILES)] + ["compute"] * FILES
    fresh(folder).fine()
    monkeypatch.delattr("kvtool.core.cache.chunks.ChunkReader.chunk_ids")  # of a large store it takes long
    assert fresh(folder).fine().json["ready"] == 1
    assert 0 < report["phase"]["texts"] < report["phase"]["texts"] + report["phase"]["kv"] <= report["seconds"]


def test_an_interrupted_run_keeps_texts_and_chunks(
    folder: Path, whole: Any, fresh: Any, one_by_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, left, compute = tmp_path / "fresh", [3], ChunkStorer._compute

    def computing(storer: ChunkStorer, batch: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        compute(storer, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ChunkStorer, "_compute", computing)
        assert fresh(folder).code == 130
    assert len(listing(path)) == FILES
    assert without_kv(path) == FILES - 3
    assert f"{FILES - 3} chunks without KV" in kvtool("inspect", "--store", path).fine().out
    kvtool("query", QUESTION, "--store", path, *SHORT).fine()
    due = without_kv(path)
    planned, done = (fresh(folder, *more).fine().json for more in (("--dry-run",), ()))
    assert planned["chunks"]["computed"] == done["chunks"]["computed"] == due < FILES - 3
    assert done["documents"]["unchanged"] == FILES
    assert payloads(path) == whole
    assert damages(path) == []


@pytest.mark.parametrize(("more", "reason"), [(("--lazy",), "lazy"), (("--for", "0s"), "time")])
def test_what_is_left_is_said_and_continued(
    more: tuple[str, ...], reason: str, folder: Path, whole: Any, fresh: Any, tmp_path: Path
) -> None:
    path = tmp_path / "fresh"
    report = fresh(folder, *more).fine().json
    assert report["left"]["reason"] == reason
    assert (report["left"]["chunks"], report["left"]["tokens"] > 0) == (FILES, True)
    assert report["chunks"]["computed"] == 0
    answer = kvtool("query", QUESTION, "--store", path, *SHORT, "--json").fine()
    assert {chunk["status"] for chunk in answer.json["chunks"]} == {"miss"}
    assert "warning" not in answer.err
    due = FILES - len(answer.json["chunks"])
    assert without_kv(path) == due
    report = fresh(folder).fine().json
    assert (report["left"], report["chunks"]["computed"], report["ready"]) == (None, due, 1)
    assert payloads(path) == whole


def test_a_full_budget_ends_the_run_at_a_chunk(folder: Path, fresh: Any, tmp_path: Path) -> None:
    path = tmp_path / "fresh"
    fresh(folder, "--lazy").fine()
    budget = bytes_in(path) + 175_000
    done = fresh(folder, "--max-size", str(budget)).fine()
    assert 0 < done.json["left"]["chunks"] < FILES
    assert done.json["chunks"]["computed"] == FILES - done.json["left"]["chunks"] == FILES - without_kv(path)
    assert done.json["left"]["reason"] == "size"
    assert "over its budget" in done.err
    assert bytes_in(path) <= budget
    assert damages(path) == []


def test_a_missed_chunk_is_the_next_to_be_computed(
    folder: Path, fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fresh"
    fresh(folder, "--lazy").fine()
    asked = ("query", "mill number", "--documents", "6.txt", "--store", path, *SHORT)
    with monkeypatch.context() as patch:
        patch.setattr("kvtool.cli.out.Out.on_terminal", True)  # a person does not wait for storing
        kvtool(*asked).fine()
    assert without_kv(path) == FILES
    assert "has not been checked" in kvtool("inspect", "gate", "--store", path).err  # no KV was reused
    first: list[str] = []
    compute = ChunkStorer._compute

    def computing(storer: ChunkStorer, batch: Any) -> None:
        first.extend(chunk.chunk_id.hex() for chunk in batch)
        compute(storer, batch)

    monkeypatch.setattr(ChunkStorer, "_compute", computing)
    fresh(folder).fine()
    (missed,) = kvtool(*asked, "--json").fine().json["chunks"]
    assert (first[0], len(first), missed["status"]) == (missed["id"], FILES, "exact")


@pytest.mark.parametrize("more", [(), ("--jsonl",)])
def test_a_document_that_is_removed_meanwhile_stays_removed(
    more: tuple[str, ...], folder: Path, fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, store_missed = tmp_path / "fresh", fuse_prompt.store_missed

    def removed_first(*given: Any, **named: Any) -> None:
        kvtool("store", "rm", folder / "6.txt", "--store", path).fine()
        store_missed(*given, **named)

    monkeypatch.setattr(fuse_prompt, "store_missed", removed_first)
    fresh(folder, "--lazy").fine()
    kvtool("query", "mill number", "--documents", "6.txt", "--store", path, *SHORT, *more).fine()
    with Store.open(path) as store:
        assert len(store.chunk_ids()) == FILES  # with the prompt's beginning


def test_a_chunk_with_a_damaged_description_is_left_and_named(folder: Path, fresh: Any, tmp_path: Path) -> None:
    path = tmp_path / "fresh"
    fresh(folder, "--lazy").fine()
    flip_row(path, tables.CHUNKS, bytes.fromhex(chunks_of(path, "6.txt")[0]))
    done = kvtool("ingest", folder / "0.txt", "--store", path).fine()  # 6.txt is not read, and stays
    assert "in 1 chunk have no KV yet (damaged: see `kvtool store verify`)" in done.out


def test_documents_without_kv_are_removed_like_others(folder: Path, fresh: Any, tmp_path: Path) -> None:
    path = tmp_path / "fresh"
    fresh(folder, "--lazy").fine()
    kvtool("store", "rm", folder / "0.txt", "--store", path).fine()
    (folder / "1.txt").unlink()
    fresh(folder, "--lazy", "--sync", "--exclude", "0.txt").fine()
    with Store.open(path) as store:
        assert (len(listing(path)), len(store.chunk_ids())) == (FILES - 2, FILES - 1)  # with the prompt's beginning


@pytest.mark.slow
def test_a_chunk_that_the_model_cannot_hold_fails_its_file_alone(folder: Path, tiny: Path, tmp_path: Path) -> None:
    for number in (4, 5):
        (folder / f"{number}.txt").write_text("The mill grinds all day. " * 800)
    args = ("ingest", folder, "--store", tmp_path / "store", "--json")
    report = kvtool(*args, "--model", tiny, *PREFIX, "--chunk-tokens", "100000").fine(3).json
    assert [Path(failure["path"]).name for failure in report["failures"]] == ["4.txt", "5.txt"]
    assert all("fewer --chunk-tokens" in failure["error"] for failure in report["failures"])
    assert report["documents"]["added"] == len(listing(tmp_path / "store")) == FILES - 2
    report = kvtool(*args, "--chunk-tokens", "64").fine().json  # and nothing is in the way of another choice
    assert (report["documents"]["added"], report["documents"]["changed"]) == (2, FILES - 2)


def test_a_model_is_compared_with_transformers_after_its_first_answer(
    folder: Path, fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "fresh"
    fresh(folder, "--lazy").fine()
    monkeypatch.setattr(check, "_why_not", lambda decoder: "layer 0 differs by 1")
    first = kvtool("query", "mill number", "--store", path, *SHORT).fine()
    assert "could not be stored: this model computes otherwise than transformers: layer 0 differs" in first.err
    assert without_kv(path) == FILES
    second = kvtool("query", "mill number", "--store", path, *SHORT).fine()
    assert "transformers computes this model: layer 0 differs" in second.err
    assert without_kv(path) < FILES
