"""A shared store of many chunks: what a push, an opening and a commit do for each of them, counted."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvtool.core.cache import tree
from kvtool.core.cache.entries import DocumentEntry, FileEntry
from kvtool.core.cache.environment import Environment
from kvtool.core.cache.store import Store
from kvtool.core.errors import RemoteError
from kvtool.core.remote import values
from kvtool.core.remote.blobs import open_blobs
from kvtool.core.remote.mirror import local_place, open_shared
from kvtool.core.remote.prefetch import Prefetcher
from kvtool.core.remote.push import push
from tests.cache.making import check_file, id_of, put
from tests.remote.test_sharing import MANIFEST, add
from tests.spying import calls_of

CHUNKS = 4  # of a file


def made(path: Path, files: int) -> Path:
    with Store.create_or_open(path) as store, store.writer() as writer:
        writer.set_manifest(MANIFEST)
        entries = []
        for number in range(files):
            name = f"f{number}"
            refs = tuple(put(writer, f"{name}.{chunk}") for chunk in range(CHUNKS))
            entries.append((FileEntry(name, 1, 2, "d", "s", (name,)), [DocumentEntry(name, "text", "x" * 99, refs)]))
        writer.commit_files(entries)
    return path


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    monkeypatch.setattr(tree, "_LEAVES", 4)
    return calls_of(monkeypatch, tree, "parse_page")


def pushed(tmp_path: Path, files: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Store, str]:
    url = f"file://{tmp_path / f'shared{files}'}"
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "writer"))
    store = Store.open(made(tmp_path / f"store{files}", files))
    with closing(open_blobs(url)) as blobs:
        push(store, blobs)
    return store, url


def test_pages_of_an_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: list[tuple[object, ...]]) -> None:
    counts = []
    for files in (100, 400):
        store, url = pushed(tmp_path, files, monkeypatch)
        monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "reader"))
        parsed.clear()
        written = calls_of(monkeypatch, Environment, "write")
        open_shared(url).close()
        counts.append(len(parsed))
        assert len(written) < 12
        store.close()
    assert counts[1] < 400 * CHUNKS
    assert counts[1] < 4 * 1.3 * counts[0], counts  # less than n log n


def test_cost_of_a_small_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: list[tuple[object, ...]]
) -> None:
    store, url = pushed(tmp_path, 200, monkeypatch)
    with store, closing(open_blobs(url)) as blobs:
        add(store, "f0", "new 0", "new 1")
        parsed.clear()
        begun = calls_of(monkeypatch, Environment, "begin")
        decoded = calls_of(monkeypatch, values, "records_of")
        assert push(store, blobs).files.transferred == 1
    assert {key for _, key, *_ in decoded} == {id_of("new 0"), id_of("new 1")}
    assert len(begun) < 200 * CHUNKS / 2
    assert len(parsed) < 200 * CHUNKS


def test_files_are_committed_together_or_not_at_all(tmp_path: Path) -> None:
    with Store.create_or_open(tmp_path / "store") as store:
        with store.writer() as writer:
            ref = put(writer, "a.0")
            sound = FileEntry("a", 1, 2, "d", "s", ("a",)), [DocumentEntry("a", "text", "a", (ref,))]
            other = FileEntry("b", 1, 2, "d", "s", ("b",)), [DocumentEntry("c", "text", "c", (ref,))]
            with pytest.raises(ValueError, match="exactly its documents"):
                writer.commit_files([sound, other])
            assert [*store.files()] == []
            writer.commit_files([sound])
        assert [entry.path for entry in store.files()] == ["a"]


@pytest.mark.parametrize("came", [30, 90])
def test_descriptions_stay_when_the_store_dies(came: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, url = pushed(tmp_path, 20, monkeypatch)
    store.close()
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "reader"))
    take, left = Prefetcher.take, [came]

    def failing(arrivals: Prefetcher, timeout: float) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise RemoteError("gone")
        return take(arrivals, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(Prefetcher, "take", failing)
        open_shared(url).close()
    with Store.open(local_place(url)) as here:
        assert len(here.chunk_ids()) == min(came - 1, 20 * CHUNKS)  # the manifest came first
        assert len([*here.files()]) == max(0, came - 1 - 20 * CHUNKS)
    with open_shared(url) as opened:
        for number in range(20):
            check_file(opened, f"f{number}", CHUNKS)


def test_shared_stores_are_opened_without_torch() -> None:
    code = "import sys, kvtool.core.remote.mirror; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
