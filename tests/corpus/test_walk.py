"""The walk that finds files: names, links, loops, and what is no file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal
from unicodedata import normalize

import pytest

from kvtool.core.corpus.walk import Skip, Skipped, Walked, find_files, places
from kvtool.core.errors import UsageError
from tests.corpus.test_ignoring import names

Form = Literal["NFC", "NFD"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    (root / "sub").mkdir(parents=True)
    for name in ("b.md", "a.txt", "sub/c.py", "README", "picture.png"):
        (root / name).write_text(name)
    return root.resolve()


def kinds(walked: Walked) -> dict[str, Skip]:
    return {Path(skipped.path).name: skipped.kind for skipped in walked.skipped}


def test_walk_is_sorted_and_takes_known_names(corpus: Path) -> None:
    found = find_files([corpus])
    assert names(corpus, found) == ["README", "a.txt", "b.md", "sub/c.py"]
    assert found.failures == []
    assert found.files[1].size == 5
    assert found.files[1].mtime_ns == (corpus / "a.txt").stat().st_mtime_ns
    assert find_files([corpus]) == found


def test_a_named_file_that_its_name_calls_no_text_is_not_read(corpus: Path) -> None:
    (corpus / "paper.PS").write_text("looks like text")
    for path in (corpus / "paper.PS", corpus / "picture.png"):
        found = find_files([path])
        assert found.files == []
        assert kinds(found) == {path.name: Skip.UNSUPPORTED}
    assert kinds(find_files([corpus], include=["*.PS"])) == {"paper.PS": Skip.UNSUPPORTED}


def test_include_and_exclude(corpus: Path) -> None:
    (corpus / "notes.xyz").write_text("text")
    assert names(corpus, find_files([corpus], include=["*.md", "sub/*"])) == ["b.md", "sub/c.py"]
    assert names(corpus, find_files([corpus], include=["*.xyz"])) == ["notes.xyz"]
    assert names(corpus, find_files([corpus], exclude=["sub/", "*.txt"])) == ["README", "b.md", "notes.xyz"]


def test_what_no_reader_takes_is_named(corpus: Path) -> None:
    assert kinds(find_files([corpus])) == {"picture.png": Skip.UNSUPPORTED}
    assert kinds(find_files([corpus], exclude=["*.png"])) == {}
    assert kinds(find_files([corpus], include=["*.txt"])) == {}
    for given in (corpus, corpus / "picture.png"):
        (skipped,) = [one for one in find_files([given]).skipped if one.path.endswith(".png")]
        assert skipped.reason == "images are not read, with any model: text only"


def test_relative_paths_become_absolute(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus / "sub")
    assert names(corpus, find_files([Path("../a.txt"), Path()])) == ["a.txt", "sub/c.py"]
    assert len(find_files([Path("..")]).files) == 4


def test_links_within_the_folder(corpus: Path) -> None:
    (corpus / "link.txt").symlink_to("a.txt")
    found = find_files([corpus, corpus / "sub", corpus / "link.txt", corpus / "sub" / ".." / "a.txt"])
    assert names(corpus, found) == ["README", "a.txt", "b.md", "sub/c.py"]
    assert found.failures == []
    assert names(corpus, find_files([corpus / "link.txt"])) == ["link.txt"]


def test_loops_and_links_that_lead_out(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret.txt").write_text("secret")
    (corpus / "sub" / "up").symlink_to(corpus)
    (corpus / "self.txt").symlink_to("self.txt")
    (corpus / "gone.txt").symlink_to("nowhere")
    (corpus / "outer").symlink_to(tmp_path / "out")
    (corpus / "secret.txt").symlink_to(tmp_path / "out" / "secret.txt")
    found = find_files([corpus], exclude=["*.png"])
    assert names(corpus, found) == ["README", "a.txt", "b.md", "sub/c.py"]
    assert kinds(found) == dict.fromkeys(("self.txt", "gone.txt", "outer", "secret.txt"), Skip.LINK)
    reasons = {Path(skipped.path).name: skipped.reason for skipped in found.skipped}
    assert "itself" in reasons["self.txt"]
    assert "leads out" in reasons["outer"]


def test_a_fifo_is_passed_over(corpus: Path) -> None:
    os.mkfifo(corpus / "pipe.txt")
    found = find_files([corpus], exclude=["*.png"])
    assert len(found.files) == 4
    assert found.skipped == [Skipped(str(corpus / "pipe.txt"), Skip.SPECIAL, "a FIFO, not a file")]


def test_missing_and_empty(tmp_path: Path, corpus: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (tmp_path / "none", corpus / "a.txt" / "below", tmp_path / "x\0y"):
        with pytest.raises(UsageError) as caught:
            find_files([path])
        assert caught.value.hint
    with pytest.raises(UsageError):
        find_files([])
    found = find_files([empty, corpus])
    assert len(found.files) == 4
    assert found.bare == [empty.resolve()]


def test_a_path_that_was_there_once_may_be_missing(tmp_path: Path, corpus: Path) -> None:
    found = find_files([corpus, tmp_path / "none"], remembered=lambda path: path.name == "none")
    assert found.missing == [tmp_path / "none"]
    with pytest.raises(UsageError, match="no such file"):
        find_files([tmp_path / "never"], remembered=lambda path: path.name == "none")


@pytest.mark.parametrize(("typed", "stored"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_name_is_found_however_its_letters_are_composed(typed: Form, stored: Form, tmp_path: Path) -> None:
    folder = tmp_path / normalize(stored, "문서")
    folder.mkdir()
    (folder / normalize(stored, "물레방아.md")).write_text("mill")
    given = tmp_path / normalize(typed, "문서") / normalize(typed, "물레방아.md")
    (found,) = find_files([given]).files
    assert found.path.exists()
    assert found.path in places(given)
    assert len(find_files([given.parent]).files) == 1
    given.parent.mkdir()
    given.write_text("another")  # both are there: each is its own
    (itself,) = find_files([given]).files
    assert itself.path.name == given.name
