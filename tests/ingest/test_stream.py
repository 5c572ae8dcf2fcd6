"""Files go through an ingest one after another: what was read is not held until all is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.writer import Writer
from kvtool.core.ingest.survey import Outcome, Survey
from tests.cli.working import PREFIX, kvtool, listing

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
