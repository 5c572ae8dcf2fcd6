"""A shared store of many chunks: what a push, an opening and a commit do for each of them, counted.

When little has changed, little of the catalogue is sent and fetched: it is in shards."""

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
from kvtool.core.remote import catalogue_io, send, values
from kvtool.core.remote.blobs import Blobs, open_blobs
from kvtool.core.remote.catalogue_io import read_catalogue
from kvtool.core.remote.folder import FolderBlobs
from kvtool.core.remote.mirror import local_place, open_shared
from kvtool.core.remote.options import PushOptions
from kvtool.core.remote.prefetch import Prefetcher
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from tests.remote.test_sharing import is_whole
from tests.spying import calls_of
from tests.stores import MANIFEST, add, check_file, forget, id_of, new_store, put

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


@pytest.mark.slow
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
        begun = calls_of(monkeypatch, Environment, "read")
        decoded = calls_of(monkeypatch, values, "records_of")
        assert push(store, blobs).files.transferred == 1
    assert {key for _, key, *_ in decoded} == {id_of("new 0"), id_of("new 1")}
    assert len(begun) < 200 * CHUNKS / 2
    assert len(parsed) < 200 * CHUNKS


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


# ---- shards of a catalogue ----------------------------------------------------------------------------------------

MANY = 40  # files of two chunks


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make shards of four entries: a hundred and twenty are in some thirty."""
    monkeypatch.setattr(catalogue_io, "ENTRIES", 4)
    monkeypatch.setattr(catalogue_io, "_FEWEST", 1)
    monkeypatch.setattr(catalogue_io, "_MOST", 8)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(new_store(tmp_path / "store", files=MANY))


@pytest.mark.usefixtures("small_shards")
def test_change_moves_only_its_shards(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change one file of forty: its two chunks, and the two that it had before."""
    fetched = calls_of(monkeypatch, FolderBlobs, "get", lambda blobs, names: {*names})
    read = calls_of(monkeypatch, FolderBlobs, "fetch", lambda blobs, asked: {one.pack or one.name for one in asked})
    put = calls_of(monkeypatch, FolderBlobs, "put", lambda blobs, values: [*values])

    def asked() -> set[str]:
        names = set().union(*read, *fetched)
        read.clear()
        fetched.clear()
        return names

    def shards() -> int:
        return sum(name.startswith("shard/") for name in asked())

    url = f"file://{tmp_path / 'shared'}"
    with store, closing(open_blobs(url)) as blobs:
        push(store, blobs)
        assert sum(name.startswith("shard/") for names in put for name in names) == 32
        monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "reader"))
        asked()
        open_shared(url).close()
        assert shards() == 32
        monkeypatch.delenv("KVTOOL_CACHE")
        add(store, "f7", "new 0", "new 1")
        forget(store)
        put.clear()
        push(store, blobs)
        sent = [name.partition("/")[0] for names in put for name in names]
        assert 1 <= sent.count("shard") <= 5
        assert (sent.count("pack"), sent.count("catalogue"), len(sent)) == (2, 1, 3 + sent.count("shard"))
        assert shards() == 0  # what this machine has sent it knows
        monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "reader"))
        with open_shared(url) as front:
            assert shards() == sent.count("shard")
            check_file(front, "f3")
            assert front.chunk_info(id_of("new 1")) is not None
            assert front.chunk_info(id_of("f7.0")) is None
            assert set(front.chunk_ids()) == set(store.chunk_ids())
        asked()
        with open_shared(url) as front:
            assert front.levels(id_of("new 1")) == ["raw"]
        assert asked() == {"head"}  # nothing has changed: all else is here
        assert is_whole(blobs)
        assert local_place(url).is_relative_to(tmp_path / "reader")


@pytest.mark.some(1)
@pytest.mark.usefixtures("small_shards")
def test_shards_grow_and_become_fewer_with_what_is_stored(store: Store, blobs: Blobs, tmp_path: Path) -> None:
    with store:
        for kept, count in ((MANY, 32), (MANY // 2, 32), (5, 4), (1, 1)):
            forget(store, *(f"f{number}" for number in range(kept, MANY)))
            push(store, blobs, PushOptions(delete=True, yes=True))
            catalogue = read_catalogue(blobs)
            assert (len(catalogue.shards), len(catalogue.files)) == (count, kept)
            assert is_whole(blobs)
        assert sum(name.startswith("shard/") for name in blobs.names()) == 1
    assert pull(tmp_path / "pulled", blobs).damaged == []


@pytest.mark.some(1)
def test_small_packs_are_merged(store: Store, blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "_MOST_SMALL", 3)
    counts = []
    with store:
        for number in range(9):
            add(store, f"n{number}", f"n{number}.0")
            push(store, blobs)
            files = read_catalogue(blobs).files.values()
            counts.append(len({file.place.pack for file in files if file.place is not None}))
    assert counts == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert pull(tmp_path / "pulled", blobs).files.transferred == MANY + 9
