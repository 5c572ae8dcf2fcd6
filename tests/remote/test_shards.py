"""A catalogue in shards: what of it is sent, and fetched, when little has changed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.remote import catalogue_io, send
from kvtool.core.remote.blobs import Blobs, open_blobs
from kvtool.core.remote.catalogue_io import read_catalogue
from kvtool.core.remote.folder import FolderBlobs
from kvtool.core.remote.mirror import local_place, open_shared
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from tests.cache.making import check_file, id_of
from tests.remote.test_sharing import add, forget, is_whole, new_store
from tests.spying import calls_of

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
    read = calls_of(monkeypatch, FolderBlobs, "_wanted", lambda blobs, one: one.pack or one.name)
    put = calls_of(monkeypatch, FolderBlobs, "put", lambda blobs, values: [*values])

    def asked() -> set[str]:
        names = set().union(read, *fetched)
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
            push(store, blobs, delete=True, yes=True)
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
