"""The check whether a cited file has changed: it reads regular files, a bounded number of bytes, and never blocks."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import pytest

from kvtool.core.cache.entries import FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.query import retrieve

GUARD = 30.0  # seconds; the check at its worst takes two


def states(*entries: FileEntry) -> list[str]:
    """What is said of each file, asked from a thread of its own so that a check that blocks fails the test."""
    known = {entry.path: entry for entry in entries}
    store, said = cast(Store, SimpleNamespace(file=known.get)), dict[str, str]()
    asking = threading.Thread(target=lambda: said.update(retrieve.changes(store, [*known])), daemon=True)
    asking.start()
    asking.join(GUARD)
    assert not asking.is_alive()
    return list(said.values())


def entry(path: Path | str, data: bytes = b"", **fields: Any) -> FileEntry:
    known: dict[str, Any] = {"size": len(data), "mtime_ns": 1, "digest": hashlib.sha256(data).hexdigest()}
    return FileEntry(path=str(path), settings="", documents=(str(path),), **known | fields)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_device_and_a_fifo_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "a.txt").write_bytes(b"text")
    entries = entry("/dev/zero"), entry(tmp_path / "fifo"), entry(tmp_path / "link"), entry(tmp_path / "a.txt", b"text")
    assert states(*entries) == [retrieve.CHANGED, retrieve.CHANGED, retrieve.CHANGED, ""]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="no /proc here")
def test_no_more_than_the_noted_size_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of /proc is regular, of size 0, and may have any number of bytes."""
    taken: list[int] = []

    class Counted(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            part = super().read(size)
            taken.append(len(part))
            return part

    monkeypatch.setattr(retrieve, "open_regular", Counted)
    assert states(entry("/proc/self/maps")) == [retrieve.CHANGED]
    assert sum(taken) <= 1


def test_a_file_system_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opener, let_go, opened = retrieve.open_regular, threading.Event(), list[str]()

    def stuck(path: str) -> BinaryIO:
        opened.append(path)
        if path.endswith("stuck.txt"):
            let_go.wait(GUARD)
        return opener(path)

    for name in ("stuck.txt", "a.txt"):
        (tmp_path / name).write_bytes(b"text")
    monkeypatch.setattr(retrieve, "open_regular", stuck)
    monkeypatch.setattr(retrieve, "_PATIENCE", 0.2)
    entries = [entry(tmp_path / name, b"atom") for name in ("stuck.txt", "a.txt")]
    try:
        assert states(*entries) == ["", retrieve.CHANGED]
        assert states(*entries) == ["", retrieve.CHANGED]
        assert [Path(path).name for path in opened].count("stuck.txt") == 1
    finally:
        let_go.set()


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_bytes(b"texts")])
def test_what_has_changed_is_still_said(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"text")
    known = entry(path, b"text")
    assert states(known) == [""]
    change(path)
    assert states(known) == [retrieve.CHANGED if path.exists() else retrieve.DELETED]
    assert states(entry("/nowhere/at/all.txt", b"text")) == [""]
