"""Files are ingested in turn; chunks of an interrupted file stay until it is done, changed or removed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.integrity import verify
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.errors import NoSpaceError
from kvtool.core.ingest.storer import ChunkStorer
from kvtool.core.ingest.survey import Outcome, Survey
from tests.cli.working import PREFIX, damages, kvtool, listing, paragraph, payloads, write_corpus
from tests.stores import add_file, id_of, put

FILES = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "in"
    made.mkdir()
    for number in range(FILES):
        (made / f"{number}.txt").write_text(f"The mill number {number} stands on the river and grinds.")
    return made


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    order: list[str] = []
    look, commit = Survey.look, Writer.commit_file

    def reading(survey: Survey, file: Any) -> Outcome:
        order.append(f"read {file.path.name}")
        return look(survey, file)

    def committing(writer: Writer, entry: Any, documents: Any) -> None:
        order.append(f"commit {Path(entry.path).name}")
        commit(writer, entry, documents)

    monkeypatch.setattr(Survey, "look", reading)
    monkeypatch.setattr(Writer, "commit_file", committing)
    return order


def test_full_batch_is_committed(folder: Path, fresh: Any, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.core.ingest.storer.BATCH_TOKENS", {"cpu": 1})
    assert fresh(folder).fine().json["chunks"]["computed"] == FILES
    for number in range(FILES - 2):
        assert steps.index(f"commit {number}.txt") < steps.index(f"read {number + 2}.txt")


def test_a_batch_spans_files(folder: Path, fresh: Any, steps: list[str]) -> None:
    fresh(folder).fine()
    assert steps == [f"read {n}.txt" for n in range(FILES)] + [f"commit {n}.txt" for n in range(FILES)]


@pytest.mark.slow
def test_a_chunk_that_the_model_cannot_hold_fails_its_file_alone(folder: Path, tiny: Path, tmp_path: Path) -> None:
    for number in (4, 5):
        (folder / f"{number}.txt").write_text("The mill grinds all day. " * 800)
    args = ("ingest", folder, "--store", tmp_path / "store", "--json")
    report = kvtool(*args, "--model", tiny, *PREFIX, "--chunk-tokens", "100000").fine(3).json
    assert [Path(failure["path"]).name for failure in report["failures"]] == ["4.txt", "5.txt"]
    assert all("fewer --chunk-tokens" in failure["error"] for failure in report["failures"])
    assert report["documents"]["added"] == len(listing(tmp_path / "store")) == FILES - 2
    assert kvtool(*args).fine().json["documents"]["unchanged"] == FILES - 2
    report = kvtool(*args, "--chunk-tokens", "64").fine().json  # and nothing is in the way of another choice
    assert (report["documents"]["added"], report["documents"]["changed"]) == (2, FILES - 2)


BEFORE = 6  # chunks that are computed before the run is interrupted
Interrupted = Callable[..., None]


@pytest.fixture
def large(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "small.md").write_text("A small mill.")
    (folder / "large.md").write_text("\n\n".join(paragraph("old", n, n % 10) for n in range(30)))
    return folder / "large.md"


@pytest.fixture
def interrupted(large: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch) -> Interrupted:
    monkeypatch.setattr("kvtool.core.ingest.storer.BATCH_TOKENS", {"cpu": 1})
    real = ChunkStorer._prefill

    def run(*more: object) -> None:
        left = [BEFORE]

        def prefill(storer: ChunkStorer, batch: Any) -> Any:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return real(storer, batch)

        with monkeypatch.context() as patch:
            patch.setattr(ChunkStorer, "_prefill", prefill)
            patch.setattr("kvtool.core.cache.writer.BATCH_BYTES", 1)  # as if seconds went by
            assert fresh(large, *more).code == 130

    return run


def unfinished(path: Path) -> dict[str, int]:
    found: dict[str, int] = kvtool("store", "stats", "--store", path, "--json").fine().json["unfinished"]
    return found


@pytest.mark.slow
def test_another_ingest_leaves_them(interrupted: Interrupted, large: Path, fresh: Any, tmp_path: Path) -> None:
    fresh(large, store=tmp_path / "whole").fine()
    interrupted()
    other = write_corpus(tmp_path / "other", 2, 2)
    planned, done = (fresh(other, *more).fine().json for more in (("--dry-run",), ()))
    assert planned["chunks"] == done["chunks"]
    assert done["chunks"]["removed"] == 0
    assert fresh(large.parent, "--exclude", "large.md").fine().json["chunks"]["removed"] == 0
    assert fresh(other, "--sync").fine().json["chunks"]["removed"] == 0
    report = fresh(large).fine().json
    assert report["chunks"]["reused"] >= BEFORE
    assert report["chunks"]["removed"] == 0
    (tmp_path / "other" / "mill0.md").write_text("Nothing.")
    fresh(other).fine()
    kvtool("store", "rm", other, large.parent / "small.md", "--yes", "--store", tmp_path / "fresh").fine()
    assert payloads(tmp_path / "fresh") == payloads(tmp_path / "whole")


@pytest.mark.slow
def test_they_are_counted_and_are_no_damage(interrupted: Interrupted, fresh: Any, large: Path, tmp_path: Path) -> None:
    path = tmp_path / "fresh"
    fresh(large.parent / "small.md").fine()
    before = kvtool("store", "stats", "--store", path, "--json").fine().json
    assert before["unfinished"] == {"files": 0, "chunks": 0, "tokens": 0, "bytes": 0}
    interrupted()
    found = unfinished(path)
    assert (found["files"], found["chunks"]) == (1, BEFORE)
    assert found["bytes"] > 0 < found["tokens"]
    after = kvtool("store", "stats", "--store", path, "--json").fine().json
    assert (after["chunks"], after["tokens"]) == (before["chunks"], before["tokens"])
    assert f"1 file begun and not finished: {BEFORE} chunks" in kvtool("inspect", "--store", path).fine().out
    with Store.open(path) as store:
        assert verify(store) == []
    kvtool("store", "compact", "--store", path).fine()
    assert unfinished(path) == found
    fresh(large).fine()
    assert unfinished(path)["files"] == 0


def test_they_go_when_the_file_changes(interrupted: Interrupted, large: Path, fresh: Any, tmp_path: Path) -> None:
    interrupted()
    large.write_text("Nobody knows who built this one.")
    assert fresh(large).fine().json["chunks"] == {"computed": 1, "reused": 0, "removed": BEFORE}
    assert unfinished(tmp_path / "fresh")["files"] == 0
    assert len(payloads(tmp_path / "fresh")) == 2 * 4


def test_they_go_with_other_settings(interrupted: Interrupted, large: Path, tmp_path: Path) -> None:
    interrupted()
    small = ("ingest", large.parent / "small.md", "--store", tmp_path / "fresh", "--json")
    assert kvtool(*small, "--chunk-tokens", "40").fine().json["chunks"]["removed"] == BEFORE


def test_what_is_gone_goes_with_sync(interrupted: Interrupted, large: Path, fresh: Any, tmp_path: Path) -> None:
    interrupted()
    large.unlink()
    assert fresh(large.parent).fine().json["chunks"]["removed"] == 0
    planned, done = (fresh(large.parent, "--sync", *more).fine().json for more in (("--dry-run",), ()))
    assert planned["chunks"]["removed"] == done["chunks"]["removed"] == BEFORE
    assert unfinished(tmp_path / "fresh")["files"] == 0


def test_forget_names_the_file(interrupted: Interrupted, large: Path, fresh: Any, tmp_path: Path) -> None:
    fresh(large.parent / "small.md").fine()
    interrupted()
    args = ("store", "rm", large, "--store", tmp_path / "fresh", "--json")
    found = unfinished(tmp_path / "fresh")
    for more in (("--dry-run",), ()):
        done = kvtool(*args, *more).fine().json
        assert (done["sources"], done["chunks"]) == ([str(large)], BEFORE)
        assert done["bytes"] > found["bytes"] // 2
    assert unfinished(tmp_path / "fresh")["files"] == 0
    with Store.open(tmp_path / "fresh") as store:
        assert len(store.chunk_ids()) == 2  # that of the small one, and the prompt's beginning
    assert len(listing(tmp_path / "fresh")) == 1


@pytest.mark.slow
def test_former_version_stays(interrupted: Interrupted, large: Path, fresh: Any, tmp_path: Path) -> None:
    text = large.read_text()
    fresh(large).fine()
    before = payloads(tmp_path / "fresh")
    large.write_text("A new beginning of it all.\n\n" + "\n\n".join(paragraph("new", n, 3) for n in range(30)) + text)
    interrupted()
    fresh(large.parent / "small.md").fine()
    assert damages(tmp_path / "fresh") == []
    assert before.items() <= payloads(tmp_path / "fresh").items()
    assert fresh(large).fine().json["chunks"]["reused"] >= BEFORE


@pytest.mark.parametrize("counted_on", [(), ("large.0", "large.1")])
def test_they_go_first_when_room_is_needed(counted_on: tuple[str, ...], tmp_path: Path) -> None:
    """But for those that the run itself counts on, and for nobody who does not say what he counts on."""
    dim, budget = 4096, 20_000_000
    labels = [f"large.{number}" for number in range(24)]  # of half a megabyte each
    with suppress(KeyboardInterrupt), Store.create_or_open(tmp_path / "store") as store, store.writer() as pen:
        pen.set_manifest({"model": "tiny"})
        add_file(pen, "small", ["small.0"], dim)
        pen.begin_file("large", map(id_of, labels))
        for label in labels:
            put(pen, label, dim=dim)
        pen.flush()
        raise KeyboardInterrupt
    with Store.open(tmp_path / "store") as store:
        assert store.unfinished_chunks() == {*map(id_of, labels)}
        with pytest.raises(NoSpaceError), store.writer(max_size=budget) as pen:
            add_file(pen, "other", [f"other.{number}" for number in range(20)], dim)
        with pytest.raises(NoSpaceError), store.writer(max_size=1_000_000) as pen:
            pen.require_room()
        assert len(store.unfinished_chunks()) == 24
        with store.writer(max_size=budget) as pen:
            pen.needed = lambda: {*map(id_of, counted_on)}
            add_file(pen, "other", [*counted_on, *(f"other.{number}" for number in range(20))], dim)
        assert store.unfinished() == {}
        assert {*store.chunk_ids()} == {
            id_of(label) for label in ("small.0", *counted_on, *(f"other.{number}" for number in range(20)))
        }
        assert verify(store) == []


@pytest.mark.slow
def test_prune_drops_them_first(interrupted: Interrupted, large: Path, fresh: Any, tmp_path: Path) -> None:
    path = tmp_path / "fresh"
    fresh(large.parent / "small.md").fine()
    kept = payloads(path)
    interrupted()
    kvtool("store", "prune", "--unused", "30d", "--store", path).fine()
    kvtool("store", "compact", "--store", path).fine()
    assert unfinished(path)["files"] == 1
    size = kvtool("store", "stats", "--store", path, "--json").fine().json["folder_bytes"]
    args = ("store", "prune", "--max-size", size - 1, "--yes", "--store", path, "--json")
    planned, done = (kvtool(*args, *more).fine().json for more in (("--dry-run",), ()))
    assert [step["step"] for step in done["steps"]] == ["unfinished"]
    assert planned["steps"] == done["steps"]
    assert unfinished(path)["files"] == 0
    assert payloads(path) == kept
