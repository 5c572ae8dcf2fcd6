"""Which files are found: names, links, loops, and what is no file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtool.core.corpus.walk import Failure, find_files
from kvtool.core.errors import UsageError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    (root / "sub").mkdir(parents=True)
    for name in ("b.md", "a.txt", "sub/c.py", "README", ".hidden.txt", "picture.png"):
        (root / name).write_text(name)
    return root.resolve()


def names(root: Path, found: list[object] | list) -> list[str]:  # type: ignore[type-arg]
    return [file.path.relative_to(root).as_posix() for file in found]


def test_walk_is_sorted_and_takes_known_names(corpus: Path) -> None:
    found, failures = find_files([corpus])
    assert names(corpus, found) == ["README", "a.txt", "b.md", "sub/c.py"]
    assert failures == []
    assert found[1].size == 5
    assert found[1].mtime_ns == (corpus / "a.txt").stat().st_mtime_ns
    assert find_files([corpus]) == (found, [])


def test_named_files_are_always_tried(corpus: Path) -> None:
    found, _ = find_files([corpus / "picture.png", corpus / ".hidden.txt"])
    assert names(corpus, found) == [".hidden.txt", "picture.png"]


def test_include_and_exclude(corpus: Path) -> None:
    assert names(corpus, find_files([corpus], include=["*.md", "sub/*"])[0]) == ["b.md", "sub/c.py"]
    assert names(corpus, find_files([corpus], include=["*.png"])[0]) == ["picture.png"]
    assert names(corpus, find_files([corpus], exclude=["sub/", "*.txt"])[0]) == ["README", "b.md"]


def test_relative_paths_become_absolute(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus / "sub")
    assert names(corpus, find_files([Path("../a.txt"), Path()])[0]) == ["a.txt", "sub/c.py"]
    assert len(find_files([Path("..")])[0]) == 4


def test_the_same_file_twice_is_found_once(corpus: Path) -> None:
    (corpus / "link.txt").symlink_to("a.txt")
    found, failures = find_files([corpus, corpus / "sub", corpus / "link.txt", corpus / "sub" / ".." / "a.txt"])
    assert names(corpus, found) == ["README", "a.txt", "b.md", "sub/c.py"]
    assert failures == []


def test_a_named_link_keeps_its_name(corpus: Path) -> None:
    (corpus / "link.txt").symlink_to("a.txt")
    assert names(corpus, find_files([corpus / "link.txt"])[0]) == ["link.txt"]


def test_loops_and_links_that_lead_out(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret.txt").write_text("secret")
    (corpus / "sub" / "up").symlink_to(corpus)
    (corpus / "self.txt").symlink_to("self.txt")
    (corpus / "gone.txt").symlink_to("nowhere")
    (corpus / "outer").symlink_to(tmp_path / "out")
    (corpus / "secret.txt").symlink_to(tmp_path / "out" / "secret.txt")
    found, failures = find_files([corpus])
    assert names(corpus, found) == ["README", "a.txt", "b.md", "sub/c.py"]
    reasons = {Path(failure.path).name: failure.error for failure in failures}
    assert set(reasons) == {"self.txt", "gone.txt", "outer", "secret.txt"}
    assert "itself" in reasons["self.txt"]
    assert "leads out" in reasons["outer"]


def test_a_fifo_is_a_failure(corpus: Path) -> None:
    os.mkfifo(corpus / "pipe.txt")
    found, failures = find_files([corpus])
    assert len(found) == 4
    assert failures == [Failure(str(corpus / "pipe.txt"), "a FIFO, not a file")]
    with pytest.raises(UsageError, match="FIFO"):
        find_files([corpus / "pipe.txt"])


@pytest.mark.parametrize(
    "name", ["new\nline.txt", "[b]x[].md", "-dash.txt", "\x1b[31m.txt", os.fsdecode(b"\xff\xfe.txt")]
)
def test_strange_names(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("text")
    found, failures = find_files([tmp_path])
    assert [file.path.name for file in found] == [name]
    assert failures == []


def test_missing_and_empty(tmp_path: Path, corpus: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (tmp_path / "none", corpus / "a.txt" / "below", tmp_path / "x\0y"):
        with pytest.raises(UsageError) as caught:
            find_files([path])
        assert caught.value.hint
    with pytest.raises(UsageError, match="no readable file"):
        find_files([empty])
    with pytest.raises(UsageError):
        find_files([])
    found, failures = find_files([empty, corpus])
    assert len(found) == 4
    assert [failure.path for failure in failures] == [str(empty.resolve())]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_folder_is_a_failure(corpus: Path) -> None:
    (corpus / "sub").chmod(0)
    found, failures = find_files([corpus])
    (corpus / "sub").chmod(0o700)
    assert len(found) == 3
    assert "permission" in failures[0].error
