"""`ingest --sync`: documents whose files are gone are removed from the store, in any folder; no others are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from tests.cli.working import damages, kvtool, listing, write_corpus


@pytest.fixture
def folder(fresh: Any, tmp_path: Path) -> Path:
    made = write_corpus(tmp_path / "in", 2, 1)
    fresh(made).fine()
    return made


def names(tmp_path: Path) -> set[str]:
    return {Path(document["source"]).name for document in listing(tmp_path / "fresh")}


def test_a_file_that_is_gone_is_forgotten_by_its_name(fresh: Any, folder: Path, tmp_path: Path) -> None:
    (folder / "mill0.md").unlink()
    done = fresh(folder / "mill0.md", "--sync").fine()
    assert done.json["documents"]["removed"] == 1
    assert "mill0.md is not there any more" in done.err
    assert names(tmp_path) == {"mill1.md"}
    assert damages(tmp_path / "fresh") == []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_that_is_gone_or_empty_is_kept(is_there: bool, fresh: Any, folder: Path, tmp_path: Path) -> None:
    """As if its disk were not mounted."""
    shutil.rmtree(folder)
    if is_there:
        folder.mkdir()
    else:
        fresh(folder).failed(2, "the store holds 2 document(s) of it", "kvtool store rm")
    for more in ((), ("--dry-run",)):
        fresh(folder, "--sync", *more).failed(2, f"nothing is at {folder} any more", "kvtool store rm")
    assert len(names(tmp_path)) == 2
    kvtool("store", "rm", folder, "--yes", "--store", tmp_path / "fresh").fine()
    fresh(folder, "--sync").failed(2) if not is_there else fresh(folder, "--sync").fine()
    assert names(tmp_path) == set()


@pytest.mark.slow
def test_one_folder_of_two_that_is_gone_holds_up_nobody(fresh: Any, folder: Path, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other", 1, 1)
    shutil.rmtree(folder)
    assert fresh(other, folder, "--sync").fine().json["documents"] | {"unchanged": 0} == {
        "added": 1, "changed": 0, "unchanged": 0, "removed": 0, "failed": 0,
    }  # fmt: skip
    (other / "mill0.md").write_text("# Another\n\nThe mill is closed.\n")
    done = fresh(other, folder, "--sync").fine()
    assert done.json["documents"]["changed"] == 1
    assert f"nothing is at {folder} any more" in done.err
    kvtool("store", "rm", folder, "--yes", "--store", tmp_path / "fresh").fine()
    assert f"{folder} is not there" in fresh(other, folder, "--sync").fine().err
    fresh(other, folder).failed(2, "no such file or folder")


def test_next_run_collects(fresh: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: Writer, **given: object) -> int:
        raise KeyboardInterrupt

    with Store.open(tmp_path / "fresh") as store:
        before = len(store.chunk_ids())
    (folder / "mill0.md").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(Writer, "collect", killed)
        assert fresh(folder, "--sync").code == 130
    assert fresh(folder, "--sync").fine().json["chunks"]["removed"] > 0
    assert fresh(folder, "--sync").fine().json["chunks"]["removed"] == 0
    with Store.open(tmp_path / "fresh") as store:
        assert len(store.chunk_ids()) < before
        assert store.is_collected()


def test_a_folder_without_documents_is_forgotten(fresh: Any, folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "empty").mkdir()
    fresh(folder).failed(2, "no readable file in this folder")
    assert fresh(folder, "--sync").fine().json["documents"]["removed"] == 2
    assert fresh(folder, "--sync", "--quiet").fine().err == ""


@pytest.mark.slow
def test_a_name_with_the_same_beginning_is_another_folder(fresh: Any, folder: Path, tmp_path: Path) -> None:
    fresh(tmp_path / "i", "--sync").failed(2, "no such file or folder")
    fresh(write_corpus(tmp_path / "in2", 1, 1)).fine()
    shutil.rmtree(folder)
    (folder / "empty").mkdir(parents=True)
    assert fresh(folder, "--sync").fine().json["documents"]["removed"] == 2
    assert len(names(tmp_path)) == 1


@pytest.mark.slow
def test_a_folder_reached_by_a_link(fresh: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder.parent)
    (folder / "mill0.md").unlink()
    assert fresh(tmp_path / "link" / "in", "--sync").fine().json["documents"]["removed"] == 1


@pytest.mark.slow
def test_failing_disk(fresh: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mill0.md").unlink()
    (folder / "new.txt").write_text("A new mill.")
    real = Path.stat

    def failing(path: Path, **more: Any) -> os.stat_result:
        if path.name == "mill0.md":
            raise OSError(5, "Input/output error", str(path))
        return real(path, **more)

    monkeypatch.setattr(Path, "stat", failing)
    monkeypatch.setattr(Path, "exists", lambda path: os.path.exists(path))  # as it is from Python 3.14 on
    report = fresh(folder, "--sync").fine().json["documents"]
    assert (report["added"], report["removed"]) == (1, 0)
