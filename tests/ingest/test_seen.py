"""An unchanged file costs a stat, and no change is missed for it."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.ingest import seen


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was read, by name."""
    counted: Counter[str] = Counter()
    real = Path.read_bytes

    def counting(path: Path) -> bytes:
        counted[path.name] += 1
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", counting)
    return counted


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "in"
    made.mkdir()
    for name in ("one", "two", "three"):
        (made / f"{name}.txt").write_text(f"The {name} mill stands on the river.")
    return made


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all files had been lying there for long."""
    monkeypatch.setattr(seen, "_RACY_SECONDS", -1e9)


def counts(fresh: Any, folder: Path, reads: Counter[str], *more: str) -> tuple[int, int, int]:
    """Files read, documents unchanged and changed of one more ingest."""
    reads.clear()
    documents = fresh(folder, *more).fine().json["documents"]
    return sum(reads[f"{name}.txt"] for name in ("one", "two", "three")), documents["unchanged"], documents["changed"]


@pytest.mark.usefixtures("settled")
def test_an_unchanged_file_is_not_read(fresh: Any, folder: Path, reads: Counter[str]) -> None:
    assert counts(fresh, folder, reads)[0] == 3
    assert counts(fresh, folder, reads) == (0, 3, 0)
    os.utime(folder / "one.txt", ns=(1, 1))
    assert counts(fresh, folder, reads) == (1, 3, 0)  # touched: read once
    assert counts(fresh, folder, reads) == (0, 3, 0)


@pytest.mark.usefixtures("settled")
def test_a_change_of_the_same_size_and_time_is_seen(fresh: Any, folder: Path, reads: Counter[str]) -> None:
    counts(fresh, folder, reads)
    path = folder / "two.txt"
    status = path.stat()
    path.write_text(path.read_text().replace("river", "ridge"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert counts(fresh, folder, reads) == (1, 2, 1)


def test_a_file_that_has_just_changed_is_not_trusted(
    fresh: Any, folder: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen, "_RACY_SECONDS", 1e9)
    counts(fresh, folder, reads)
    assert counts(fresh, folder, reads) == (3, 3, 0)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 1, "marks": "%%"}'])
def test_without_marks_files_are_read(
    content: bytes, fresh: Any, folder: Path, reads: Counter[str], tmp_path: Path
) -> None:
    counts(fresh, folder, reads)
    (tmp_path / "fresh" / "seen" / "files.json").write_bytes(content)
    assert counts(fresh, folder, reads) == (3, 3, 0)
    assert counts(fresh, folder, reads) == (0, 3, 0)


@pytest.mark.usefixtures("settled")
def test_another_command_reads_its_files_anew(fresh: Any, folder: Path, reads: Counter[str]) -> None:
    counts(fresh, folder, reads)
    command = ("--reader", "txt=tac {}", "--read-timeout", "10m")
    assert counts(fresh, folder, reads, *command) == (3, 0, 3)
    assert counts(fresh, folder, reads, *command) == (0, 3, 0)
