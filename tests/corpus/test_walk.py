"""The walk that finds files, and what it leaves out: by ignore files, hidden names, lock files, secrets, links."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Literal
from unicodedata import normalize

import pytest

from kvtool.core.corpus import ignoring
from kvtool.core.corpus.walk import Skip, Skipped, Walked, find_files, places
from kvtool.core.errors import UsageError
from tests.wording import refused

Form = Literal["NFC", "NFD"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = (tmp_path / "repository").resolve()
    made.mkdir()
    return made


def put(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")


def names(root: Path, walked: Walked) -> list[str]:
    return [file.path.relative_to(root).as_posix() for file in walked.files]


def skipped(root: Path, walked: Walked) -> dict[str, Skip]:
    return {Path(one.path).relative_to(root).as_posix(): one.kind for one in walked.skipped}


def test_ignore_files_hold_below_their_folder(root: Path) -> None:
    put(root, "a.md", "draft.md", "build/x.md", "sub/draft.md", "sub/keep.md", "sub/only.md", "other/only.md")
    (root / ".gitignore").write_text("# made\n!\nbuild/\ndraft.md\n")
    (root / "sub" / ".gitignore").write_text("/only.md\n!draft.md\n")
    found = find_files([root])
    assert names(root, found) == ["a.md", "other/only.md", "sub/draft.md", "sub/keep.md"]
    assert skipped(root, found) == dict.fromkeys(("build", "draft.md", "sub/only.md"), Skip.IGNORED)
    everything = find_files([root], ignore=False)
    assert len(everything.files) == 7
    assert everything.skipped == []


def test_kvtools_own_ignore_file_has_the_last_word(root: Path) -> None:
    put(root, "docs/a.md", "b.md", "c.md")
    (root / ".gitignore").write_text("docs/\n")
    (root / ".kvtoolignore").write_text("!docs/\nc.md\n")
    assert names(root, find_files([root])) == ["b.md", "docs/a.md"]


def test_repositories_speak_for_their_folders(root: Path) -> None:
    put(root, "docs/a.md", "docs/draft.md")
    (root / ".gitignore").write_text("draft.md\n")
    assert names(root, find_files([root / "docs"])) == ["docs/a.md", "docs/draft.md"]
    put(root, "docs/a.md", "docs/draft.md", "build/a.md", ".git/config")
    (root / ".gitignore").write_text("draft.md\nbuild/\n")
    assert names(root, find_files([root / "docs"])) == ["docs/a.md"]
    assert names(root, find_files([root / "build"])) == ["build/a.md"]
    assert names(root, find_files([root / "docs" / "draft.md"])) == ["docs/draft.md"]


def test_hidden_names_lock_files_and_secrets(root: Path) -> None:
    put(root, "a.md", ".hidden/b.md", ".c.md", "package-lock.json", "Cargo.lock", ".env", "prod.env", "server.pem")
    put(root, "id_rsa", "Credentials.json", "~$a.docx", ".git/x.md")
    (root / "link.txt").symlink_to(root / ".env")
    found = find_files([root])
    assert names(root, found) == ["a.md"]
    assert skipped(root, found) == {
        **dict.fromkeys((".hidden", ".c.md"), Skip.HIDDEN),
        **dict.fromkeys(("package-lock.json", "Cargo.lock", "~$a.docx"), Skip.LOCK),
        **dict.fromkeys((".env", "prod.env", "server.pem", "id_rsa", "Credentials.json", "link.txt"), Skip.SECRET),
    }
    assert names(root, find_files([root / ".env", root / ".hidden"])) == [".env", ".hidden/b.md"]
    assert "package-lock.json" in names(root, find_files([root], ignore=False))
    assert "server.pem" not in names(root, find_files([root], include=["*.pem"], ignore=False))


def test_an_ignore_file_that_is_a_pipe_is_waited_for_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("A mill.")
    os.mkfifo(tmp_path / ".gitignore")
    found: list[str] = []
    walk = threading.Thread(target=lambda: found.extend(names(tmp_path, find_files([tmp_path]))), daemon=True)
    walk.start()
    walk.join(120)
    assert found == ["a.md"]


def test_a_range_that_runs_backwards_is_no_pattern(root: Path) -> None:
    """And a bracket in a bracket is one of the characters, of which nobody is warned."""
    put(root, "a.md", "b.md")
    (root / ".gitignore").write_text("[z-a].md\n[[x]*.md\nb.md\n")
    assert names(root, find_files([root])) == ["a.md"]


@pytest.fixture
def shared(root: Path) -> Path:
    """A folder that is open to others, with what it does not show."""
    put(root, "sub/a.md", "sub/draft.md", "sub/deep/draft.md", "sub/deep/b.md", "sub/made/c.md", ".hidden/d.md")
    put(root, "e.env", "sub/.f.md", "sub/g.key", "secret.draft.md")
    (root / ".gitignore").write_text("draft.md\n")
    (root / ".kvtoolignore").write_text("/sub/made/\n*.draft.md\n")
    return root


@pytest.mark.parametrize("named", [".", "sub", "sub/deep", "sub/a.md", "sub/draft.md", "sub/made", "sub/made/c.md"])
def test_a_root_speaks_for_each_folder_and_file_in_it(shared: Path, named: str) -> None:
    shown = {"sub/a.md", "sub/deep/b.md"}
    found = find_files([shared / named], roots=[shared])
    below = {name for name in shown if (shared / name).is_relative_to((shared / named).resolve())}
    assert set(names(shared, found)) == below
    if not below:
        assert [Path(one.path) for one in found.skipped] == [shared / named]


@pytest.mark.parametrize("target", [".hidden/d.md", "sub/.f.md", "sub/draft.md", "secret.draft.md", "sub/made/c.md"])
def test_a_link_shows_nothing_that_its_root_does_not(shared: Path, target: str) -> None:
    (shared / "sub" / "link.md").symlink_to(shared / target)
    for named in (".", "sub", "sub/link.md"):
        found = find_files([shared / named], roots=[shared])
        assert "sub/link.md" not in names(shared, found)
        assert "sub/link.md" in skipped(shared, found)


def test_links_and_folders_that_a_root_shows(shared: Path, tmp_path: Path) -> None:
    (shared / "sub" / "link.md").symlink_to(shared / "sub" / "a.md")
    assert names(shared, find_files([shared / "sub" / "link.md"], roots=[shared])) == ["sub/link.md"]
    inner = shared / ".hidden"
    assert names(shared, find_files([inner], roots=[shared, inner])) == [".hidden/d.md"]
    assert ".hidden/d.md" not in names(shared, find_files([shared], roots=[shared, inner]))
    put(tmp_path, "outside.md")
    (found,) = find_files([tmp_path / "outside.md"], roots=[shared]).skipped
    assert found.path == str(tmp_path / "outside.md")


def test_another_case_passes_no_rule(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems that take no notice of it: a folder is found as `Drafts`, and listed as `drafts`."""
    put(root, "drafts/a.md", "Drafts/a.md", "b.md")
    (root / ".gitignore").write_text("drafts/\n")
    assert names(root, find_files([root / "Drafts"], roots=[root])) == ["Drafts/a.md"]
    real = os.listdir
    monkeypatch.setattr(ignoring.os, "listdir", lambda path: [name for name in real(path) if name != "Drafts"])
    monkeypatch.setattr(ignoring, "_is_folded", lambda folder: True)
    assert find_files([root / "Drafts"], roots=[root]).files == []
    assert names(root, find_files([root / "b.md"], roots=[root])) == ["b.md"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    (root / "sub").mkdir(parents=True)
    for name in ("b.md", "a.txt", "sub/c.py", "README", "picture.png"):
        (root / name).write_text(name)
    return root.resolve()


def test_walk_is_sorted_and_takes_known_names(corpus: Path) -> None:
    found = find_files([corpus])
    assert names(corpus, found) == ["README", "a.txt", "b.md", "sub/c.py"]
    assert found.failures == []
    assert found.files[1].size == 5
    assert found.files[1].mtime_ns == (corpus / "a.txt").stat().st_mtime_ns
    assert find_files([corpus]) == found


def test_include_and_exclude(corpus: Path) -> None:
    (corpus / "notes.xyz").write_text("text")
    assert names(corpus, find_files([corpus], include=["*.md", "sub/*"])) == ["b.md", "sub/c.py"]
    assert names(corpus, find_files([corpus], include=["*.xyz"])) == ["notes.xyz"]
    assert names(corpus, find_files([corpus], exclude=["sub/", "*.txt"])) == ["README", "b.md", "notes.xyz"]


def test_what_no_reader_takes_is_named(corpus: Path) -> None:
    for given in (corpus, corpus / "picture.png"):
        (left_out,) = find_files([given]).skipped
        assert (Path(left_out.path).name, left_out.kind) == ("picture.png", Skip.UNSUPPORTED)
        assert left_out.reason == "images are not read, with any model: text only"
    (corpus / "paper.PS").write_text("looks like text")
    for found in (find_files([corpus / "paper.PS"]), find_files([corpus], include=["*.PS"])):
        assert (found.files, skipped(corpus, found)) == ([], {"paper.PS": Skip.UNSUPPORTED})
    for more in ({"exclude": ["*.png", "*.PS"]}, {"include": ["*.txt"]}):
        assert find_files([corpus], **more).skipped == []  # type: ignore[arg-type]


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
    assert skipped(corpus, found) == dict.fromkeys(("self.txt", "gone.txt", "outer", "secret.txt"), Skip.LINK)
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
    for paths in ([tmp_path / "none"], [corpus / "a.txt" / "below"], [tmp_path / "x\0y"], []):
        with refused(UsageError):
            find_files(paths)
    found = find_files([empty, corpus])
    assert len(found.files) == 4
    assert found.bare == [empty.resolve()]


def test_a_path_that_was_there_once_may_be_missing(tmp_path: Path, corpus: Path) -> None:
    found = find_files([corpus, tmp_path / "none"], remembered=lambda path: path.name == "none")
    assert found.missing == [tmp_path / "none"]
    with refused(UsageError):
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
