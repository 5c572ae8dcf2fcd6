"""Hostile files: each one fails by name, and the others are ingested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtool.core.corpus import reading
from kvtool.core.ingest import stream
from tests.cli.working import listing
from tests.ingest.test_seen import before_reading


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "error", [RecursionError("too deep"), MemoryError(), UnicodeEncodeError("gbk", "x", 0, 1, "no"), KeyError("x")]
)
@pytest.mark.parametrize(("room", "step"), [(reading, "read_documents"), (stream, "prepare")])
def test_exceptions(
    error: Exception, room: Any, step: str, folder: Path, fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(room, step)

    def failing(subject: Any, *rest: Any) -> Any:
        path = subject if isinstance(subject, Path) else subject.found.path
        if path.name == "two.txt":
            raise error
        return real(subject, *rest)

    monkeypatch.setattr(room, step, failing)
    done = fresh(folder).fine(3)
    assert done.json["documents"]["added"] == 2
    assert [Path(failure["path"]).name for failure in done.json["failures"]] == ["two.txt"]
    assert "two.txt" in done.err
    assert len(listing(tmp_path / "fresh")) == 2
    fresh(folder, "--fail-fast", "--retry", store=tmp_path / "fast").failed(1, "two.txt")


def test_a_file_too_large_to_read(folder: Path, fresh: Any) -> None:
    with (folder / "two.txt").open("wb") as file:
        file.truncate(1 << 40)  # no byte of it is on the disk
    done = fresh(folder).fine(3).json
    assert done["documents"]["added"] == 2
    assert "larger than 2 GiB" in done["failures"][0]["error"]


@pytest.mark.slow
def test_a_file_that_goes_while_it_is_looked_for(folder: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanish(path: Path) -> None:
        if path.name == "two.txt":
            raise FileNotFoundError(2, "No such file or directory", str(path))

    before_reading(monkeypatch, vanish)
    done = fresh(folder).fine().json
    assert done["documents"]["added"] == 2
    assert done["skipped"]["gone"] == 1
