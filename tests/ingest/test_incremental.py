"""Only what changed is computed, nothing is loaded where nothing changed, and `--sync` removes documents whose files
are gone, in any folder, and no others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from tests.cli.working import (
    CHUNKS,
    chunks_of,
    damages,
    drop_records,
    environment,
    files_below,
    kvtool,
    listing,
    paragraph,
    payloads,
    prefix_chunk,
    write_corpus,
)


def refuse(*args: object, **options: object) -> None:
    raise AssertionError("a model or a tokenizer was loaded")


@pytest.mark.slow
def test_the_second_run_imports_no_torch(store: Path, corpus: Path) -> None:
    program = (
        "import sys; from kvtool.cli.app import main; code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy', 'office_oxide', 'xlrd', 'pypdfium2', 'lxml'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "sys.exit(code)"
    )
    args = ["ingest", str(corpus), "--store", str(store), "--json"]
    for more in ([], ["--sync"], ["--dry-run"], ["--lead-in", "warm"], [*CHUNKS]):
        done = subprocess.run(
            [sys.executable, "-c", program, *args, *more], capture_output=True, text=True, env=environment()
        )
        assert done.returncode == 0, done.stderr
        assert '"unchanged": 6' in done.stdout


@pytest.mark.slow
def test_an_edit_in_the_middle(fresh: Any, tmp_path: Path) -> None:
    paragraphs = [paragraph("old", n, n % 10) for n in range(30)]
    file = tmp_path / "long.md"
    file.write_text("\n\n".join(paragraphs))
    count = fresh(file).fine().json["chunks"]["computed"]
    assert count >= 15
    before = chunks_of(tmp_path / "fresh", "long.md")
    kept = payloads(tmp_path / "fresh")
    paragraphs[15] = "Nobody knows who built this one, nor when."
    file.write_text("\n\n".join(paragraphs))
    report = fresh(file).fine().json
    assert report["documents"]["changed"] == 1
    assert 1 <= report["chunks"]["computed"] <= 3
    assert report["chunks"]["reused"] >= count - 3
    after = chunks_of(tmp_path / "fresh", "long.md")
    assert report["chunks"]["removed"] == len(set(before) - set(after))
    now = payloads(tmp_path / "fresh")
    assert all(now[key] == kept[key] for key in now if key in kept)
    assert {chunk for chunk, _ in now} == {*after, prefix_chunk(tmp_path / "fresh")}
    file.write_text("\n\n".join([*paragraphs[:15], *paragraphs[16:]]))
    assert fresh(file).fine().json["chunks"]["computed"] <= 3


def test_the_same_chunk_in_two_documents(fresh: Any, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "sub/a.txt"):
        (folder / name).write_text("The mill stands on the river.")
    report = fresh(folder).fine().json
    assert report["documents"]["added"] == 3
    assert report["chunks"] == {"computed": 1, "reused": 0, "removed": 0}
    assert len(payloads(tmp_path / "fresh")) == 2 * 4
    (folder / "b.txt").unlink()
    report = fresh(folder, "--sync").fine().json
    assert report["documents"]["removed"] == 1
    assert report["chunks"]["removed"] == 0  # the others still have it
    found = kvtool("query", "mill", "--store", tmp_path / "fresh", "--max-tokens", "2", "--json").fine().json
    assert len(found["chunks"]) == 1


def test_a_renamed_file_needs_no_model(fresh: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_corpus(tmp_path / "in", documents=3)
    fresh(folder).fine()
    before = payloads(tmp_path / "fresh")
    (folder / "mill1.md").rename(folder / "renamed.md")
    monkeypatch.setattr("kvtool.core.checkpoint.load.load_model", refuse)
    report = fresh(folder, "--sync").fine().json
    assert report["documents"] == {"added": 1, "changed": 0, "unchanged": 2, "removed": 1, "failed": 0}
    assert report["chunks"]["computed"] == report["chunks"]["removed"] == 0
    assert payloads(tmp_path / "fresh") == before


def test_dry_run_writes_nothing(store: Path, corpus: Path, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_text("A new mill on another river.")
    copy = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    before, count = files_below(store), sum(len(document["chunks"]) for document in listing(store))
    args = ("ingest", tmp_path / "new.txt", copy, "--dry-run", "--json")
    report = kvtool(*args, "--store", store).fine().json
    assert report["dry_run"] is True
    assert report["documents"]["added"] == 7
    assert report["chunks"]["computed"] == 1  # the copies' chunks are known
    assert report["chunks"]["reused"] == count
    assert report["tokens"] > 0
    assert files_below(store) == before
    report = kvtool(*args, "--store", tmp_path / "none", "--model", tiny, *CHUNKS).fine().json
    assert report["chunks"]["computed"] == count + 1
    assert not (tmp_path / "none").exists()


def test_holes_are_filled_by_the_next_ingest(store: Path, corpus: Path) -> None:
    before = payloads(store)
    drop_records(store, *chunks_of(store, "mill3.md")[1:3])
    report = kvtool("ingest", corpus, "--store", store, "--json").fine().json
    assert report["documents"]["unchanged"] == 6
    assert report["chunks"]["computed"] == 2
    assert payloads(store) == before


@pytest.fixture
def folder(fresh: Any, tmp_path: Path) -> Path:
    made = write_corpus(tmp_path / "in", 2, 1)
    fresh(made).fine()
    return made


def names(tmp_path: Path) -> set[str]:
    return {Path(document["source"]).name for document in listing(tmp_path / "fresh")}


def test_sync_removes_below_the_paths_given(fresh: Any, folder: Path, tmp_path: Path) -> None:
    two = write_corpus(tmp_path / "two", 3, 1)
    (two / "mill0.md").unlink()
    fresh(two).fine()
    for gone in (folder / "mill0.md", two / "mill2.md"):
        gone.unlink()
    assert fresh(folder).fine().json["documents"]["removed"] == 0
    report = fresh(folder, "--sync").fine().json
    assert (report["documents"]["removed"], report["chunks"]["removed"] > 0) == (1, True)
    assert names(tmp_path) == {"mill1.md", "mill2.md"}
    assert damages(tmp_path / "fresh") == []
    assert fresh(two, "--sync", "--exclude", "mill1.md").fine().json["documents"]["removed"] == 1  # excluded: not gone


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
