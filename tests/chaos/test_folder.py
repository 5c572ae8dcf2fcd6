"""Folders that are no store, not this store, not a finished store, or not writable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvtool.core.cache import store as store_module
from kvtool.core.cache import tables
from kvtool.core.cache.record import Kind, seal
from kvtool.core.cache.store import Store
from kvtool.core.cache.tables import META
from kvtool.core.errors import DamagedError, KvtoolError, StoreFormatError, StoreNotFoundError
from tests.chaos.injury import flip_bit
from tests.chaos.processes import command
from tests.stores import check_file, id_of, make_store


def check_refusal(path: Path, error: Any, **match: str) -> None:
    """Neither is it opened nor made anew."""
    for door in (Store.open, Store.create_or_open):
        with pytest.raises(error, **match):
            door(path)


def test_no_store(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (tmp_path / "none", tmp_path / "none/deeper", empty):
        with pytest.raises(StoreNotFoundError) as caught:
            Store.open(path)
        assert "make one with `kvtool ingest PATH`" in caught.value.hint
    assert not (tmp_path / "none").exists()
    assert os.listdir(empty) == []


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "photos"
    path.mkdir(mode=0o755)
    (path / "cat.jpg").write_bytes(b"x")
    with pytest.raises(StoreFormatError):
        Store.create_or_open(path)
    with pytest.raises(StoreNotFoundError) as caught:
        Store.open(path)
    assert "make one" not in caught.value.hint
    assert "an empty or a new folder" in caught.value.hint
    assert os.listdir(path) == ["cat.jpg"]
    assert path.stat().st_mode & 0o777 == 0o755


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    check_refusal(path, StoreFormatError)
    check_refusal(path / "below", KvtoolError)


@pytest.mark.parametrize("inside", [False, True])
def test_a_foreign_lmdb(tmp_path: Path, inside: bool) -> None:
    path = tmp_path / "store"
    if inside:
        shutil.rmtree(make_store(path) / "data/gen-1")
    lmdb.open(str(path / "data/gen-1" if inside else path), max_dbs=4).close()
    check_refusal(path, (StoreFormatError, DamagedError))


def test_the_data_of_another_store(tmp_path: Path) -> None:
    path, other = make_store(tmp_path / "store"), make_store(tmp_path / "other")
    shutil.rmtree(path / "data")
    shutil.copytree(other / "data", path / "data")
    with pytest.raises(StoreFormatError):
        Store.open(path)


def test_other_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store(tmp_path / "store")
    text = json.loads((path / "store.json").read_text())
    (path / "store.json").write_text(json.dumps({**text, "format": 99}))
    check_refusal(path, StoreFormatError, match="format 99")
    (path / "store.json").write_text(json.dumps(text))
    with Store.open(path) as store:
        inside = seal(tables.STORE_KEY, Kind.STORE, json.dumps({**text, "format": 98}).encode())
        store.environment.write(lambda txn: txn.put(META + tables.STORE_KEY, inside), 0)
    with pytest.raises(StoreFormatError, match="format 98"):
        Store.open(path)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b'{"format": 1}', b'{"uuid": 5, "format": 1}', b"\xff" * 9]
)
def test_damaged_store_file(tmp_path: Path, text: bytes) -> None:
    path = make_store(tmp_path / "store")
    (path / "store.json").write_bytes(text)
    check_refusal(path, DamagedError, match=r"store\.json")


def test_every_flipped_bit_of_the_store_file_is_told(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    sound = (path / "store.json").read_bytes()
    for bit in range(8 * len(sound)):
        (path / "store.json").write_bytes(flip_bit(sound, bit // 8, bit % 8))
        with pytest.raises(KvtoolError):
            Store.open(path)
    (path / "store.json").write_bytes(sound)
    Store.open(path).close()


def test_lost_store_file_loses_no_data(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    (path / "store.json").unlink()
    with pytest.raises(StoreNotFoundError):
        Store.open(path)
    with pytest.raises(StoreFormatError):
        Store.create_or_open(path)
    assert (path / "data/gen-1/data.mdb").exists()


@pytest.mark.parametrize("text", [None, b"", b"gen-0", b"../gen-1", b"gen-7", b"\xff"])
def test_damaged_pointer(tmp_path: Path, text: bytes | None) -> None:
    path = make_store(tmp_path / "store")
    if text is None:
        (path / "current").unlink()
    else:
        (path / "current").write_bytes(text)
    check_refusal(path, DamagedError)


@pytest.mark.parametrize("name", ["store.json", "current", "data/gen-1/data.mdb", "data/gen-1/lock.mdb"])
def test_a_fifo_does_not_hang(tmp_path: Path, name: str) -> None:
    path = make_store(tmp_path / "store")
    (path / name).unlink()
    os.mkfifo(path / name)
    check_refusal(path, (StoreFormatError, KvtoolError))


def test_side_files_that_are_fifos_do_not_hang(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    for name in ("access.log", "served.log"):
        os.mkfifo(path / name)
    with Store.open(path) as store:
        store.note_access([id_of("f0.0")], missed=1)
        store.flush()
        assert store.served().questions == 0
        with store.writer() as pen:
            assert pen.collect() == 0


def test_a_creation_that_was_killed_is_completed(tmp_path: Path) -> None:
    whole = make_store(tmp_path / "whole")
    for stage, kept in enumerate(([], ["store.json"], ["store.json", "current"])):
        path = tmp_path / f"stage{stage}"
        (path / ".tmp-data/gen-1").mkdir(parents=True)
        (path / ".tmp-1-abcd").write_bytes(b"half")
        for name in ("writer.lock", *kept):
            shutil.copy(whole / name, path / name)
        with pytest.raises((StoreNotFoundError, DamagedError)):
            Store.open(path)
        make_store(path)
        with Store.open(path) as store:
            check_file(store, "f0")


def test_what_a_killed_compaction_leaves(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    shutil.copytree(path / "data/gen-1", path / "data/gen-2")
    with Store.open(path) as store:
        check_file(store, "f0")
        with store.writer() as pen:
            pen.compact()
        check_file(store, "f0")
    assert os.listdir(path / "data") == ["gen-2"]  # made anew: what was left is removed by any writer


def test_lock_file_garbage(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    (path / "data/gen-1/lock.mdb").write_bytes(os.urandom(5000))
    (path / "writer.lock").write_bytes(os.urandom(50))
    (path / "writer.json").write_bytes(b"\xff{")
    with Store.open(path) as store:
        check_file(store, "f0")
        with store.writer() as pen:
            pen.remove_file("f1")


def test_read_only_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store(tmp_path / "store")
    before = {entry: entry.stat().st_mtime_ns for entry in path.rglob("*")}
    monkeypatch.setattr(store_module.os, "access", lambda place, mode: False)
    with Store.open(path) as store:
        assert store.read_only
        check_file(store, "f0")
        store.note_access([id_of("f0.0")])
        with pytest.raises(KvtoolError, match="read-only"), store.writer():
            pass
    assert {entry: entry.stat().st_mtime_ns for entry in path.rglob("*")} == before


@pytest.mark.slow
def test_read_only_mount(tmp_path: Path) -> None:
    """A real one where we may mount: root ignores permission bits, but not this."""
    path = make_store(tmp_path / "store")
    (path / "data/gen-1/lock.mdb").unlink()
    mount = f'mount --bind {path} {path} && mount -o remount,ro,bind {path} && exec "$@"'
    words = ["unshare", "-rm", "sh", "-c", mount, "sh"]
    probe = subprocess.run([*words, "true"], capture_output=True, check=False) if shutil.which("unshare") else None
    if probe is None or probe.returncode:
        pytest.skip("mounting is not allowed here; the simulated test stands in")
    found = subprocess.run([*words, *command(path, "read")], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "2 True True\n"), found.stderr
    refused = subprocess.run([*words, *command(path, "add", 5, 1)], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "read-only" in refused.stderr


def test_relative_paths_survive_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_store(Path("store"))
    with Store.open(Path("store")) as store:
        monkeypatch.chdir("/")
        check_file(store, "f0")
        with store.writer() as pen:
            pen.remove_file("f0")
