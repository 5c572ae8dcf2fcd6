"""A store that follows its files, round by round."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.common.types import Events
from kvtool.core.errors import UsageError
from kvtool.core.ingest import watcher as watching
from kvtool.core.ingest.options import WatchOptions
from kvtool.core.ingest.storer import ChunkStorer
from kvtool.core.ingest.watcher import Watcher
from tests.cli.working import kvtool, listing
from tests.wording import refused


class Told:
    def __init__(self) -> None:
        self.took: list[tuple[str, str]] = []
        self.warned: list[str] = []
        self.failed: list[str] = []
        self.loaded = 0
        self.events = Events(
            took=lambda path, what, chunks: self.took.append((what, Path(path).name)),
            warn=lambda text, hint: self.warned.append(text),
            failed=lambda path, why: self.failed.append(Path(path).name),
            status=self._status,
        )

    def _status(self, text: str) -> None:
        self.loaded += text.startswith("loading")

    def taken(self) -> list[tuple[str, str]]:
        taken, self.took = sorted(self.took), []
        return taken


def followed(watcher: Watcher, told: Told) -> list[tuple[str, str]]:
    """What a round takes once a file may have changed."""
    watcher.wait()
    watcher.round(told.events)
    return told.taken()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.md").write_text("The first mill grinds flour.")
    return folder


def options(tiny: Path, *paths: Path, **more: Any) -> WatchOptions:
    return WatchOptions.of(
        {"paths": paths, "model": str(tiny), "lead_in": "prefix", "debounce": 0.1, "lock_wait": 0, **more}
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def watcher(tiny: Path, folder: Path, place: Path, told: Told) -> Iterator[Watcher]:
    with closing(Watcher(place, options(tiny, folder))) as watcher:
        assert watcher.round(told.events) is not None
        assert told.taken() == [("added", "a.md")]
        yield watcher


@pytest.mark.slow
def test_files_are_followed_with_one_model(watcher: Watcher, folder: Path, told: Told) -> None:
    (folder / "b.md").write_text("The second mill grinds corn.")
    assert followed(watcher, told) == [("added", "b.md")]
    (folder / "new").write_text("The first mill was torn down.")
    (folder / "new").replace(folder / "a.md")  # as editors save
    (folder / "b.md").unlink()
    assert followed(watcher, told) == [("changed", "a.md"), ("removed", "b.md")]
    assert told.loaded == 1


def test_what_is_not_selected_takes_no_lock(watcher: Watcher, folder: Path, place: Path, told: Told) -> None:
    with Store.open(place) as store, store.writer():
        (folder / ".a.md.swp").write_text("half a sentence")
        (folder / "a.md~").write_text("what it was")
        (folder / "picture.png").write_bytes(b"\x89PNG")
        (folder / ".kvtoolignore").write_text("private.md\n")
        (folder / "private.md").write_text("Not ever.")
        assert watcher.round(told.events) is None
    assert told.warned == []


@pytest.mark.slow
def test_between_rounds_others_write(watcher: Watcher, folder: Path, place: Path, told: Told) -> None:
    (folder / "b.md").write_text("The second mill grinds corn.")
    kvtool("ingest", folder, "--store", place).fine()
    assert watcher.round(told.events).documents.unchanged == 2
    assert told.taken() == []


def test_a_changed_file_goes_before_the_kv_of_others(
    watcher: Watcher, folder: Path, place: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtool.core.ingest.storer.BATCH_TOKENS", {"cpu": 1})
    computed: list[int] = []
    compute = ChunkStorer._compute

    def computing(storer: ChunkStorer, batch: Any) -> None:
        compute(storer, batch)
        computed.append(len(listing(place)))
        if changed := {1: "noise.log~", 2: "c.md"}.get(len(computed)):  # the first one is not selected
            (folder / changed).write_text("The third mill stands still.")
            assert watcher._changes._happened.wait(30)

    monkeypatch.setattr(ChunkStorer, "_compute", computing)
    names = ["b1.md", "b2.md", "b3.md"]
    for name in names:
        (folder / name).write_text(f"The mill {name} grinds corn.")
    assert followed(watcher, told) == [("added", name) for name in names]
    assert followed(watcher, told) == [("added", "c.md")]
    assert computed == [4, 4, 5, 5]


def test_locked_store(watcher: Watcher, folder: Path, place: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_AGAIN_S", 0.0)
    (folder / "b.md").write_text("The second mill grinds corn.")
    with Store.open(place) as store, store.writer():
        assert watcher.round(told.events) is None
    assert len(told.warned) == 1
    assert followed(watcher, told) == [("added", "b.md")]


def test_unreadable_file_is_told_once_per_content(watcher: Watcher, folder: Path, told: Told) -> None:
    for number in range(2):
        (folder / "bad.txt").write_bytes(b"\0" * (10 + number))
        watcher.round(told.events)
        (folder / f"good{number}.md").write_text(f"Mill number {number} is good.")
        watcher.round(told.events)
    assert told.failed == ["bad.txt", "bad.txt"]


@pytest.mark.slow
def test_vanished_folder_keeps_its_documents(watcher: Watcher, folder: Path, told: Told) -> None:
    moved = folder.rename(folder.with_name("elsewhere"))
    watcher.wait()
    assert watcher.round(told.events) is None
    assert len(told.warned) == 1
    moved.rename(folder)
    (folder / "b.md").write_text("The second mill grinds corn.")
    assert followed(watcher, told) == [("added", "b.md")]
    (folder / "c.md").write_text("The third mill stands still.")  # it is listened to again
    assert followed(watcher, told) == [("added", "c.md")]


@pytest.mark.slow
def test_emptied_folder(tiny: Path, watcher: Watcher, folder: Path, place: Path, told: Told) -> None:
    """As a mount point is without its disk; also for a watch that begins then."""
    moved = folder.rename(folder.with_name("elsewhere"))
    folder.mkdir()
    watcher.wait()
    assert watcher.round(told.events) is None
    with closing(Watcher(place, options(tiny, folder))) as later:
        assert later.round(told.events) is None
    assert told.warned == 2 * [f"nothing is at {folder} now"]
    folder.rmdir()
    moved.rename(folder)
    assert followed(watcher, told) == []
    (folder / "b.md").write_text("The second mill grinds corn.")
    assert followed(watcher, told) == [("added", "b.md")]
    (folder / "a.md").unlink()
    assert followed(watcher, told) == [("removed", "a.md")]


@pytest.mark.slow
def test_named_file_is_followed(tiny: Path, tmp_path: Path, folder: Path, place: Path, told: Told) -> None:
    note = tmp_path / "note.txt"
    note.write_text("A note on mills.")
    with closing(Watcher(place, options(tiny, note, folder))) as watcher:
        watcher.round(told.events)
        told.taken()
        (tmp_path / "new").write_text("Another note on mills.")
        (tmp_path / "new").replace(note)
        assert followed(watcher, told) == [("changed", "note.txt")]
        note.unlink()
        assert followed(watcher, told) == [("removed", "note.txt")]
        assert watcher.round(told.events) is None
        note.write_text("A third note.")
        assert followed(watcher, told) == [("added", "note.txt")]


@pytest.mark.slow
def test_empty_folder_makes_no_store(tiny: Path, tmp_path: Path, place: Path, told: Told) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with closing(Watcher(place, options(tiny, empty))) as watcher:
        assert watcher.round(told.events) is None
        assert not place.exists()
        (empty / "a.md").write_text("The first mill grinds flour.")
        assert followed(watcher, told) == [("added", "a.md")]


def test_a_path_that_is_not_there_is_refused(tiny: Path, folder: Path, place: Path) -> None:
    with refused(UsageError):
        Watcher(place, options(tiny, folder, folder / "typo"))


def test_a_change_that_keeps_size_and_time_is_one(watcher: Watcher, folder: Path, told: Told) -> None:
    before = (folder / "a.md").stat()
    (folder / "a.md").write_text("The other mill grinds flour.")
    os.utime(folder / "a.md", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (folder / "a.md").stat().st_size == before.st_size
    watcher.round(told.events)
    assert told.taken() == [("changed", "a.md")]
