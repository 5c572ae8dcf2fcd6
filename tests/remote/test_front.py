"""The local cache of a shared store keeps what is asked for, within its budget."""

from __future__ import annotations

import itertools
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtool.core.cache import layout
from kvtool.core.cache.entries import DocumentEntry, FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.remote.blobs import open_blobs
from kvtool.core.remote.mirror import MOST_BUDGET, local_place, open_shared
from kvtool.core.remote.push import push
from kvtool.core.upkeep.forget import pin
from kvtool.core.upkeep.prune import keep_budget
from tests.stores import IDENTITY, LAYERS, id_of, make_store, noise, put

FILES, DIM = 12, 8192  # a chunk takes 1 MB


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(2_000_000_000)
    monkeypatch.setattr("kvtool.core.cache.side_files.time", SimpleNamespace(time=lambda: next(clock)))


@pytest.fixture
def url(tmp_path: Path) -> str:
    with Store.open(make_store(tmp_path / "store", FILES, 1, DIM)) as store:
        with store.writer() as writer:
            writer.set_manifest({"identity": IDENTITY})
        with closing(open_blobs(f"file://{tmp_path / 'shared'}")) as blobs:
            push(store, blobs)
    return f"file://{tmp_path / 'shared'}"


def ask(url: str, *numbers: int) -> None:
    chunks = [id_of(f"f{number}.0") for number in numbers]
    with open_shared(url, warn=lambda text, hint: pytest.fail(text)) as tier:
        for layer in range(LAYERS):
            assert all(isinstance(found, tuple) for found in tier.read_layer(chunks, "raw", layer))
        tier.note_access(chunks)


def limit(url: str, more: int) -> int:
    """Give the local cache a budget of so many bytes more than it has."""
    open_shared(url).close()
    budget = layout.folder_bytes(local_place(url)) + more
    keep_budget(local_place(url), budget)
    return budget


def here(url: str) -> list[int]:
    with Store.open(local_place(url)) as store:
        return [number for number in range(FILES) if store.levels(id_of(f"f{number}.0"))]


def test_a_new_one_has_a_budget(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the disk at most, which may not be large."""
    for free, least, most in ((30 * 10**9, 15 * 10**9, 16 * 10**9), (10**12, MOST_BUDGET, MOST_BUDGET)):
        monkeypatch.setattr(layout, "disk_free", lambda path, free=free: free)
        open_shared(url).close()
        with Store.open(local_place(url)) as store:
            assert least <= store.stats()["budget"] <= most
        shutil.rmtree(local_place(url))
    open_shared(url).close()
    keep_budget(local_place(url), None)
    open_shared(url).close()
    with Store.open(local_place(url)) as store:
        assert store.budget() is None  # its owner's word counts


def test_what_is_coldest_gives_way(url: str) -> None:
    budget = limit(url, 6 * 10**6)
    for number in range(FILES):
        ask(url, number)
        ask(url, 0)
        assert layout.folder_bytes(local_place(url)) <= budget
        assert {0, number} <= set(here(url))
    kept = here(url)
    assert 3 <= len(kept) <= 6
    assert kept == [0, *range(FILES - len(kept) + 1, FILES)]
    with Store.open(local_place(url)) as store:
        assert len(store.sources()) == FILES
    ask(url, 1)  # fetched again
    assert 1 in here(url)


def test_a_budget_that_was_lowered_is_met(url: str) -> None:
    for number in range(6):
        ask(url, number)
    assert len(here(url)) == 6
    budget = limit(url, -3 * 10**6)
    ask(url, 7)
    assert layout.folder_bytes(local_place(url)) <= budget
    assert 7 in here(url)


def test_what_was_asked_often_outlasts_what_came_later(url: str) -> None:
    budget = limit(url, 6 * 10**6)
    for _ in range(3):
        ask(url, 0)
    for number in range(1, FILES):
        ask(url, number)
        assert layout.folder_bytes(local_place(url)) <= budget
        assert {0, number} <= {*here(url)}


def test_a_question_that_is_larger_than_the_budget_is_answered_and_drives_nothing_out(url: str) -> None:
    limit(url, 5 * 10**6)
    for _ in range(4):
        ask(url, 11)
    ask(url, 0, 1, 2, 3, 4, 5)
    kept = here(url)
    assert 11 in kept
    assert 2 <= len(kept) < 7
    ask(url, 0, 1, 2, 3, 4, 5)
    assert here(url) == kept  # what is there is read again, and not driven out by the rest
    keep_budget(local_place(url), 0)
    ask(url, 0, 1)
    assert here(url) == []


def test_kv_gives_way_to_new_documents(url: str, tmp_path: Path) -> None:
    for number in range(6):
        ask(url, number)
    limit(url, 300_000)
    with Store.open(tmp_path / "store") as store:
        with store.writer() as writer:
            text = noise("long", 200_000).hex()
            entry = FileEntry("long", 1, 2, "digest", "settings", ("long",))
            writer.commit_file(entry, [DocumentEntry("long", "text", text, (put(writer, "long"),))])
        with closing(open_blobs(url)) as blobs:
            push(store, blobs)
    with open_shared(url, warn=lambda text, hint: pytest.fail(text)) as tier:
        assert "long" in tier.sources()
        assert layout.folder_bytes(tier.path) <= (tier.budget() or 0)
    assert 0 < len(here(url)) < 6


def test_a_pinned_document_stays_here(url: str) -> None:
    for number in range(4):
        ask(url, number)
    pin(local_place(url), ["f0"])
    limit(url, 500_000)
    for number in range(4, 8):
        ask(url, number)
    assert {0, 7} <= set(here(url))
    assert len(here(url)) < 8
