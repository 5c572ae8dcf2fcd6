"""No space: a full disk, a map limit, a file limit. An error with numbers, and a store as it was before."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvtool.core.cache import layout
from kvtool.core.cache.integrity import verify
from kvtool.core.cache.store import Store
from kvtool.core.errors import NoSpaceError
from tests.chaos.processes import run
from tests.stores import add_file, check_file, make_store
from tests.wording import refused


def fail(*given: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def files_in(path: Path) -> int:
    """Everything there reads back; how many files that is."""
    with Store.open(path) as store:
        assert verify(store) == []
        for name in store.sources():
            check_file(store, name, dim=256)
        return len(store.sources())


@pytest.mark.slow
def test_writer_at_the_map_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store(tmp_path / "store", files=1, dim=256)
    full = run(path, "add", 1, 100, 2, 256, KVTOOL_MAP_LIMIT=str(2**20))
    assert full.returncode == 14
    assert "map limit of 1.0 MB" in full.stderr
    assert full.stdout.count("\nf") == files_in(path) - 1 > 1
    more = run(path, "add", 1, 20, 2, 256)  # run again with room: it completes
    assert more.returncode == 0
    assert files_in(path) == 21


def test_writer_continues_after_a_file_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store(tmp_path / "store", files=1, dim=256)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Store.open(path) as store, store.writer() as pen:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, hard))
        try:
            with pytest.raises(NoSpaceError):
                add_file(pen, "big", [f"big.{number}" for number in range(20)], dim=256)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        check_file(store, "f0", dim=256)
        add_file(pen, "f1", ["f1.0", "f1.1"], dim=256)
        check_file(store, "f1", dim=256)
        assert store.file("big") is None


def test_writer_leaves_the_disk_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store(tmp_path / "store", files=2)
    monkeypatch.setenv("KVTOOL_DISK_RESERVE", str(2**60))
    with Store.open(path) as store, store.writer() as pen:
        with pytest.raises(NoSpaceError):
            add_file(pen, "f9", ["f9.0"])
        assert store.file("f9") is None
        assert pen.remove_file("f1")  # freeing space works on a full disk
        assert pen.collect() == 2
        check_file(store, "f0")


def test_free_pages_are_reused_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store(tmp_path / "store", files=20, dim=256)
    with Store.open(path) as store, store.writer() as pen:
        for number in range(20):
            pen.remove_file(f"f{number}")
        pen.collect()
        monkeypatch.setenv("KVTOOL_DISK_RESERVE", str(2**60))
        add_file(pen, "f0", ["f0.0", "f0.1"], dim=256)
        check_file(store, "f0", dim=256)


@pytest.mark.parametrize(("removed", "free", "shrinks"), [(4, None, False), (19, 4096, False), (19, None, True)])
def test_compaction_spends_the_reserve_if_it_frees_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int, free: int | None, shrinks: bool
) -> None:
    path = make_store(tmp_path / "store", files=20, dim=256)
    with Store.open(path) as store, store.writer() as pen:
        for number in range(1, removed + 1):
            pen.remove_file(f"f{number}")
        pen.collect()
        monkeypatch.setenv("KVTOOL_DISK_RESERVE", str(2**60))
        if free is not None:
            monkeypatch.setattr(layout, "disk_free", lambda folder: free)
        if shrinks:
            assert pen.compact() > 0
        else:
            with refused(NoSpaceError):  # without a word of prune, which may be the very command that says it
                pen.compact()
        check_file(store, "f0", dim=256)


def test_tail_of_a_failed_commit_is_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store(tmp_path / "store", files=1, dim=256)
    with Store.open(path) as store, store.writer() as pen:
        data, before = store.environment.generation / "data.mdb", store.stats()
        with data.open("ab") as file:
            file.truncate(before["file_bytes"] + 2**22)  # a hole is no free space
            assert store.stats()["free_bytes"] == before["free_bytes"] == store.environment.free_bytes()
            file.truncate(before["file_bytes"])
            file.write(bytes([1]) * 2**22)
            file.flush()
            os.fsync(file.fileno())
        after = store.stats()
        assert after["free_bytes"] == before["free_bytes"] + 2**22 == store.environment.free_bytes()
        assert after["live_bytes"] + after["free_bytes"] <= after["file_bytes"]
        monkeypatch.setenv("KVTOOL_DISK_RESERVE", str(2**60))
        add_file(pen, "f9", ["f9.0", "f9.1"], dim=256)
        assert store.stats()["file_bytes"] == after["file_bytes"]
        with pytest.raises(NoSpaceError):
            add_file(pen, "big", [f"big.{number}" for number in range(200)], dim=256)
    assert files_in(path) == 2


def test_commands_that_free_space_spend_the_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store(tmp_path / "store", files=1)
    monkeypatch.setenv("KVTOOL_DISK_RESERVE", str(2**60))
    with Store.open(path) as store, store.writer() as pen:
        pen.spend_reserve()
        add_file(pen, "f1", ["f1.0", "f1.1"])
        monkeypatch.setattr(layout, "disk_free", lambda folder: 4096)
        with pytest.raises(NoSpaceError):
            add_file(pen, "f2", ["f2.0"])
        check_file(store, "f1")


def test_reader_without_space_for_its_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lock.mdb lost and no space for a new one: LMDB would die of SIGBUS; we read without it."""
    path = make_store(tmp_path / "store")
    (path / "data/gen-1/lock.mdb").unlink()

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with Store.open(path) as store:
        assert store.read_only
        check_file(store, "f0")


def test_full_disk_keeps_the_old_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    layout.atomic_write(target, b"old")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(NoSpaceError):
        layout.atomic_write(target, b"new")
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"] or sorted(os.listdir(tmp_path)) == ["file", "home"]


def test_reader_in_a_small_address_space(tmp_path: Path) -> None:
    """ulimit -v: a smaller map, not a failure."""
    path = make_store(tmp_path / "store")
    script = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (3 * 10**8,) * 2); sys.argv.pop(0)\n"
    work = Path(__file__).with_name("storework.py")
    script += f"import runpy; runpy.run_path({str(work)!r}, run_name='__main__')"
    found = subprocess.run(
        [sys.executable, "-c", script, "work", str(path), "read"], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (0, "2 False True\n"), found.stderr
