"""Push and pull: the same bytes on the other side, whatever happened in between."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtool.core.cache import tables
from kvtool.core.cache.entries import DocumentEntry
from kvtool.core.cache.integrity import find_damage
from kvtool.core.cache.store import Store
from kvtool.core.errors import (
    DamagedError,
    StoreFormatError,
    StoreLockedError,
    StoreNotFoundError,
    UsageError,
)
from kvtool.core.remote import values
from kvtool.core.remote.blobs import Blobs
from kvtool.core.remote.catalogue import HEAD
from kvtool.core.remote.catalogue_io import read_catalogue
from kvtool.core.remote.options import ImportOptions, PullOptions, PushOptions
from kvtool.core.remote.packs import import_sources
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from tests.stores import MANIFEST, add_file, bytes_of, check_file, id_of, make_store, new_store, put

pytestmark = pytest.mark.usefixtures("small_packs")

PROFILE = hashlib.blake2b(b"a profile", digest_size=16).digest()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(new_store(tmp_path / "store", files=2)) as opened:
        with opened.writer() as writer:
            writer.put_profile(PROFILE, b"a profile", {"profile": PROFILE.hex()})
        yield opened


def sent(store: Store, blobs: Blobs, **options: bool) -> tuple[int, int]:
    report = push(store, blobs, PushOptions(**options))
    assert report.damaged == []
    return report.files.transferred, report.chunks.transferred


def test_push_and_pull_round_trip(store: Store, blobs: Blobs, tmp_path: Path) -> None:
    assert sent(store, blobs) == (2, 4)
    report = pull(tmp_path / "other", blobs, PullOptions(mine=True))
    assert (report.files.transferred, report.chunks.transferred, report.damaged) == (2, 4, [])
    assert bytes_of(tmp_path / "other") == bytes_of(store.path)
    with Store.open(tmp_path / "other") as other:
        for name in ("f0", "f1"):
            check_file(other, name)
        assert other.manifest() == MANIFEST
        assert other.codec_state() == store.codec_state()
        assert bytes(other.profile(PROFILE) or b"") == b"a profile"
        assert list(find_damage(other, 1)) == []  # type: ignore[arg-type]
        assert sent(other, blobs) == (0, 0)  # the same catalogue from either side


def test_push_and_pull_transfer_only_missing_values(store: Store, blobs: Blobs, tmp_path: Path) -> None:
    sent(store, blobs)
    before = set(blobs.names())
    assert sent(store, blobs) == (0, 0)
    assert set(blobs.names()) == before
    pull(tmp_path / "other", blobs)
    with store.writer() as writer:
        add_file(writer, "f2", ["f2.0", "f0.1"])  # a chunk that is there already
    assert sent(store, blobs) == (1, 1)
    report = pull(tmp_path / "other", blobs)
    assert (report.files.transferred, report.chunks.transferred, report.chunks.unchanged) == (1, 1, 4)


def test_removed_documents_stay_without_delete(store: Store, blobs: Blobs, tmp_path: Path) -> None:
    sent(store, blobs)
    pull(tmp_path / "other", blobs)
    with store.writer() as writer:
        writer.remove_file("f1")
        writer.collect()
    sent(store, blobs)
    assert len(read_catalogue(blobs).files) == 2
    assert push(store, blobs, PushOptions(delete=True)).removed
    there = read_catalogue(blobs)
    assert len(there.files) == 1
    assert set(blobs.names("pack/")) | set(blobs.names("file/")) <= there.blobs()
    assert pull(tmp_path / "other", blobs).removed == 0
    assert pull(tmp_path / "other", blobs, PullOptions(delete=True)).removed == 1
    assert bytes_of(tmp_path / "other") == bytes_of(store.path)


def test_pull_delete_of_most_documents_needs_yes(store: Store, blobs: Blobs, tmp_path: Path) -> None:
    """Pull from a new shared store, or another: no reason to forget what was never pushed and is nowhere else."""
    sent(store, blobs)
    with Store.open(new_store(tmp_path / "mine", files=4)) as mine, mine.writer() as writer:
        for number in range(3):
            add_file(writer, f"own{number}", [f"own{number}"])
    rehearsed = pull(tmp_path / "mine", blobs, PullOptions(delete=True, mine=True, dry_run=True))
    done = pull(tmp_path / "mine", blobs, PullOptions(delete=True, yes=True, mine=True))
    assert (rehearsed.removed, done.removed) == (5, 5)
    assert (rehearsed.files, rehearsed.chunks) == (done.files, done.chunks)
    assert pull(tmp_path / "mine", blobs, PullOptions(delete=True, mine=True, dry_run=True)).files.transferred == 0
    with Store.open(tmp_path / "mine") as mine, mine.writer() as writer:
        for number in range(3):
            add_file(writer, f"own{number}", [f"own{number}"])
    with pytest.raises(UsageError):
        pull(tmp_path / "mine", blobs, PullOptions(delete=True, mine=True))
    with Store.open(tmp_path / "mine") as mine:
        assert len(mine.sources()) == 5


def test_an_import_keeps_both_and_the_newer_of_two(store: Store, blobs: Blobs, tmp_path: Path) -> None:
    sent(store, blobs)
    pull(tmp_path / "other", blobs, PullOptions(mine=True))

    def change(of: Store, path: str, label: str, when: int) -> None:
        with of.writer() as writer:
            ref = put(writer, label)
            entry = replace(of.file("f0"), path=path, documents=(path,), mtime_ns=when)  # type: ignore[type-var]
            writer.commit_file(entry, [DocumentEntry(path, "text", label, (ref,))])

    change(store, "f0", "mine", 10)
    change(store, "f1", "older", 5)
    with Store.open(tmp_path / "other") as other:
        change(other, "f0", "theirs", 9)
        change(other, "f1", "newer", 6)
        change(other, "f3", "own", 1)
    path = store.path
    import_sources(tmp_path / "other", [path], ImportOptions(mine=True))
    import_sources(path, [tmp_path / "other"], ImportOptions(mine=True))
    for where in (path, tmp_path / "other"):
        with Store.open(where) as one:
            texts = {entry.source: entry.text for entry in one.documents()}
        assert texts == {"f0": "mine", "f1": "newer", "f3": "own"}


@pytest.mark.slow
def test_import_reads_no_kv_before_its_lock(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values.Survey, "catalogue", lambda *given: pytest.fail("the source was read"))
    path = make_store(tmp_path / "other")
    with Store.open(path) as busy, busy.writer(), pytest.raises(StoreLockedError):
        import_sources(path, [store.path], ImportOptions(mine=True))


def test_levels_come_with_what_they_refine(store: Store, blobs: Blobs, tmp_path: Path) -> None:
    with store.writer() as writer:
        put(writer, "f0.0", "lossless")
    sent(store, blobs)
    pull(tmp_path / "some", blobs, PullOptions(levels=("lossless",)))
    with Store.open(tmp_path / "some") as some:
        assert some.levels(id_of("f0.0")) == ["lossless"]
        assert some.levels(id_of("f0.1")) == []
        assert some.chunk_info(id_of("f0.1")) is not None
        assert [entry.source for entry in some.documents()] == ["f0", "f1"]
    assert pull(tmp_path / "some", blobs).chunks.transferred == 4
    assert bytes_of(tmp_path / "some") == bytes_of(store.path)


def test_damaged_profile_is_left_out(store: Store, blobs: Blobs) -> None:
    with store.writer() as writer:
        writer.commit([(tables.PROFILES, PROFILE, b"damaged")])
    assert [row["subject"] for row in push(store, blobs).damaged] == [f"profile {PROFILE.hex()}"]
    assert read_catalogue(blobs).profiles == ()


def test_another_models_store_is_refused(store: Store, blobs: Blobs, tmp_path: Path) -> None:
    sent(store, blobs)
    with Store.open(make_store(tmp_path / "foreign")) as foreign:
        with foreign.writer() as writer:
            writer.set_manifest({"identity": {"fingerprint": "another", "model": "tiny"}})
        before = set(blobs.names())
        with pytest.raises(StoreFormatError):
            push(foreign, blobs)
        assert set(blobs.names()) == before
    with pytest.raises(StoreFormatError):
        pull(tmp_path / "foreign", blobs)
    with pytest.raises(StoreNotFoundError), Store.create_or_open(tmp_path / "empty") as empty:
        push(empty, blobs)


@pytest.mark.parametrize("name", ["head", "catalogue", "shard"])
def test_push_verify_repairs_a_damaged_catalogue(
    name: str, store: Store, blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent(store, blobs)
    (found,) = [one for one in blobs.names() if one.startswith(name)]
    (whole,) = blobs.get([found])
    blobs.put({found: b"something else"})
    if name != HEAD:  # who pushed it has a copy
        push(store, blobs)
        assert blobs.get([found]) == [whole]
        blobs.put({found: b"something else"})
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "of another machine"))
    for attempt in (lambda: pull(tmp_path / "other", blobs), lambda: push(store, blobs)):
        with pytest.raises(DamagedError):
            attempt()
    push(store, blobs, PushOptions(verify=True))
    assert pull(tmp_path / "other", blobs).damaged == []
    assert bytes_of(tmp_path / "other") == bytes_of(store.path)
