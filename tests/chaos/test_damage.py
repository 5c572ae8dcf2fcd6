"""Flipped, cut and swapped bytes: reported, never answered with, never a signal (law 8)."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvtool.core.cache import tables
from kvtool.core.cache.integrity import find_damage, repair, verify
from kvtool.core.cache.record import Kind, seal
from kvtool.core.cache.side_files import read_served
from kvtool.core.cache.store import Store
from kvtool.core.cache.tables import META
from kvtool.core.cache.tree import check_data_file
from kvtool.core.errors import DamagedError, KvtoolError, StoreFormatError, StoreNotFoundError
from tests.chaos.injury import flip_bit
from tests.chaos.processes import command
from tests.stores import LAYERS, check_file, id_of, make_store, payload_of, put
from tests.wording import refused

DIM = 256


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store", dim=DIM)


def overwrite(path: Path, table: bytes, key: bytes, value: bytes | None) -> None:
    """What no writer does: put other bytes under a key, or take them away."""

    def apply(transaction: object) -> None:
        if value is None:
            transaction.delete(table + key)  # type: ignore[attr-defined]
        else:
            transaction.put(table + key, value)  # type: ignore[attr-defined]

    with Store.open(path) as store:
        store.environment.write(apply, 0)


def flip(path: Path, table: bytes, key: bytes, at: int) -> None:
    overwrite(path, table, key, flip_bit(stored(path, table, key), at))


def stored(path: Path, table: bytes, key: bytes) -> bytes:
    with Store.open(path) as store, store.snapshot() as snapshot:
        value = snapshot.get(table, key)
        assert value is not None
        return bytes(value)


def test_flipped_payload_is_reported_and_never_read(path: Path) -> None:
    """One bit of a payload, found by its bytes in data.mdb: LMDB does not notice, we do."""
    data = path / "data/gen-1/data.mdb"
    payload = payload_of("f0.1", 1, dim=DIM)[1]
    at = data.read_bytes().index(payload)
    data.write_bytes(flip_bit(data.read_bytes(), at + 100))
    with Store.open(path) as store:
        with pytest.raises(DamagedError):
            store.read_kv(id_of("f0.1"), "raw", 1)
        sound, damaged = store.read_layer([id_of("f0.0"), id_of("f0.1")], "raw", 1)
        assert isinstance(sound, tuple)
        assert isinstance(damaged, DamagedError)
        (found,) = verify(store)
        assert (found.chunk, found.level, found.layer) == (id_of("f0.1").hex(), "raw", 1)


@pytest.mark.parametrize("other", [("f0.1", 0), ("f0.0", 1)], ids=["another chunk's", "another layer's"])
def test_swapped_records_are_damage(path: Path, other: tuple[str, int]) -> None:
    places = [("f0.0", 0), other]
    keys = [tables.record_key(id_of(label), "raw", layer) for label, layer in places]
    values = [stored(path, tables.RECORDS, key) for key in keys]
    for key, value in zip(keys, reversed(values), strict=True):
        overwrite(path, tables.RECORDS, key, value)
    with Store.open(path) as store:
        for label, layer in places:
            with pytest.raises(DamagedError):
                store.read_kv(id_of(label), "raw", layer)
        assert len(verify(store)) == 2


def test_writing_a_record_again_replaces_a_damaged_one(path: Path) -> None:
    flip(path, tables.RECORDS, tables.record_key(id_of("f0.0"), "raw", 1), 500)
    with Store.open(path) as store:
        assert store.has_chunk(id_of("f0.0"))
        with store.writer() as pen:
            put(pen, "f0.0", dim=DIM)
        check_file(store, "f0", dim=DIM)
        assert verify(store) == []


def _rows(path: Path) -> list[tuple[bytes, bytes]]:
    with Store.open(path) as store, store.snapshot() as snapshot:
        return [(table, key) for table in tables.TABLES for key in snapshot.keys(table)]


@pytest.mark.slow
def test_repair_of_every_flipped_or_removed_row(tmp_path: Path) -> None:
    """Flip a byte of every row in turn, and drop every row in turn; repair; ingest what is missing; all is sound."""
    original = make_store(tmp_path / "original", files=1)
    for number, (table, key) in enumerate(_rows(original)):
        for value in (flip_bit(stored(original, table, key), 70), None):
            if (table, key) == (tables.META, tables.STORE_KEY):
                continue  # see test_store_folder
            path = tmp_path / f"copy-{number}-{value is None}"
            shutil.copytree(original, path)
            overwrite(path, table, key, value)
            _check_repair(path, table, dropped=value is None)
            shutil.rmtree(path)


def _check_repair(path: Path, table: bytes, dropped: bool) -> None:
    with Store.open(path) as store:
        damages = list(find_damage(store, Fraction(1)))
        harmless = dropped and table in (tables.META, tables.FILES, tables.DOCUMENTS, tables.LEVELS, tables.ADDED)
        assert damages or harmless, table
        with store.writer() as pen:
            assert bool(repair(store, pen, damages)) == bool(damages)
        assert list(find_damage(store, Fraction(1))) == []
    make_store(path, files=1)  # ingest again
    with Store.open(path) as store:
        assert list(find_damage(store, Fraction(1))) == []
        check_file(store, "f0")


def test_repair_removes_documents_of_a_damaged_file(path: Path) -> None:
    flip(path, tables.FILES, tables.name_key("f0"), 70)
    with Store.open(path) as store, store.writer() as pen:
        repair(store, pen, find_damage(store, Fraction(1)))
        with store.snapshot() as snapshot:
            assert [*snapshot.keys(tables.DOCUMENTS)] == [tables.name_key("f1")]


def test_damaged_chunk_description_is_a_miss(path: Path) -> None:
    key = id_of("f0.0")
    flip(path, tables.CHUNKS, key, 80)
    with Store.open(path) as store:
        assert not store.has_chunk(key)
        with pytest.raises(DamagedError):
            store.chunk_info(key)


def test_damaged_document_stops_garbage_collection(path: Path) -> None:
    flip(path, tables.DOCUMENTS, tables.name_key("f0"), 80)
    with Store.open(path) as store, store.writer() as pen:
        with pytest.raises(DamagedError):
            pen.collect()
        assert len(store.chunk_ids()) == 4


def test_truncated_data_file_is_refused(path: Path) -> None:
    data = path / "data/gen-1/data.mdb"
    whole = data.read_bytes()
    cuts = {0, 1, 16, 100, 4095, 4096, 5000, 8191, 8192, len(whole) // 2, len(whole) - 4096, len(whole) - 1}
    for cut in sorted(cuts):
        data.write_bytes(whole[:cut])
        with pytest.raises(DamagedError):
            Store.open(path)
        assert data.stat().st_size == cut  # nobody made a new store of it
        with pytest.raises(DamagedError):
            Store.create_or_open(path)
    data.write_bytes(whole)
    with Store.open(path) as store:
        check_file(store, "f0", dim=DIM)


def test_data_file_truncated_while_open(path: Path) -> None:
    """The file is cut under an open store: a short read instead of SIGBUS, where values are read from the file."""
    data = path / "data/gen-1/data.mdb"
    with Store.open(path) as store:
        at = data.read_bytes().index(payload_of("f1.1", LAYERS - 1, dim=DIM)[0])
        with data.open("r+b") as file:
            file.truncate(at + 10)
        with pytest.raises(DamagedError):
            store.read_kv(id_of("f0.0"), "raw", 0)


@pytest.mark.slow
def test_data_file_without_its_last_free_page_is_sound(tmp_path: Path) -> None:
    """LMDB leaves a page unwritten that a transaction took at the end and gave up: no damage, and no false alarm."""
    found = sum(_shorter(tmp_path / str(seed), random.Random(seed)) for seed in range(150))
    assert found


def _shorter(folder: Path, dice: random.Random) -> int:
    env = lmdb.open(str(folder), map_size=2**24, lib_version=0, sync=False)
    names = [b"%06d" % number for number in range(dice.randrange(50, 600))]
    with env.begin(write=True) as transaction:
        for name in names:
            transaction.put(name, bytes(dice.randrange(10, 900)))
    data, found = folder / "data.mdb", 0
    for _ in range(6):
        start = dice.randrange(len(names))
        with env.begin(write=True) as transaction:
            for name in names[start : start + dice.randrange(1, 60)]:
                transaction.delete(name)
        check_data_file(folder)
        if data.stat().st_size < (env.info()["last_pgno"] + 1) * 4096:
            found += 1
            shutil.copytree(folder, folder / "cut")
            os.truncate(folder / "cut/data.mdb", 8192 + 4096)
            with pytest.raises(DamagedError):
                check_data_file(folder / "cut")
            shutil.rmtree(folder / "cut")
    env.close()
    return found


def test_verify_reports_a_signal_of_its_child(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.core.cache.integrity._CHILD", "import os, signal; os.kill(os.getpid(), signal.SIGBUS)")
    with Store.open(path) as store:
        (found,) = verify(store)
    assert "SIGBUS" in found.reason


def test_damaged_meta_pages_are_refused(path: Path) -> None:
    data = path / "data/gen-1/data.mdb"
    whole = data.read_bytes()
    for at in (16, 20, 40, 4096 + 16, 4096 + 20):
        data.write_bytes(flip_bit(whole, at))
        with pytest.raises((DamagedError, StoreFormatError)):
            Store.open(path)


@pytest.mark.parametrize("key", [tables.STORE_KEY, tables.REVISION_KEY])
def test_damaged_store_name_or_revision_names_the_way_out(path: Path, key: bytes) -> None:
    """The store's own name, and its revision: without either nothing of it is answered."""
    flip(path, tables.META, key, len(stored(path, tables.META, key)) // 2)
    with refused(DamagedError), Store.open(path) as store:
        store.revision()


# ---- folders that are no store, not this store, not a finished store, or not writable ----


def check_refusal(path: Path, error: Any) -> None:
    """Neither is it opened nor made anew."""
    for door in (Store.open, Store.create_or_open):
        with pytest.raises(error):
            door(path)


def test_missing_store_is_not_made(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (tmp_path / "none", tmp_path / "none/deeper", empty):
        with refused(StoreNotFoundError):
            Store.open(path)
    assert not (tmp_path / "none").exists()
    assert os.listdir(empty) == []


def test_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "photos"
    path.mkdir(mode=0o755)
    (path / "cat.jpg").write_bytes(b"x")
    with pytest.raises(StoreFormatError):
        Store.create_or_open(path)
    with refused(StoreNotFoundError):
        Store.open(path)
    assert os.listdir(path) == ["cat.jpg"]
    assert path.stat().st_mode & 0o777 == 0o755


def test_file_in_place_of_a_store(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    check_refusal(path, StoreFormatError)
    check_refusal(path / "below", KvtoolError)


@pytest.mark.parametrize("inside", [False, True])
def test_foreign_lmdb_is_refused(tmp_path: Path, inside: bool) -> None:
    path = tmp_path / "store"
    if inside:
        shutil.rmtree(make_store(path) / "data/gen-1")
    lmdb.open(str(path / "data/gen-1" if inside else path), max_dbs=4).close()
    check_refusal(path, (StoreFormatError, DamagedError))


def test_data_of_another_store_is_refused(tmp_path: Path) -> None:
    path, other = make_store(tmp_path / "store"), make_store(tmp_path / "other")
    shutil.rmtree(path / "data")
    shutil.copytree(other / "data", path / "data")
    with pytest.raises(StoreFormatError):
        Store.open(path)


def test_other_formats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store(tmp_path / "store")
    text = json.loads((path / "store.json").read_text())
    (path / "store.json").write_text(json.dumps({**text, "format": 99}))
    for door in (Store.open, Store.create_or_open):
        with refused(StoreFormatError, numbers=True):
            door(path)
    (path / "store.json").write_text(json.dumps(text))
    with Store.open(path) as store:
        inside = seal(tables.STORE_KEY, Kind.STORE, json.dumps({**text, "format": 98}).encode())
        store.environment.write(lambda txn: txn.put(META + tables.STORE_KEY, inside), 0)
    with refused(StoreFormatError, numbers=True):
        Store.open(path)


FIFO = object()
BROKEN: list[tuple[str, Any, Any]] = [
    *(
        ("store.json", text, DamagedError)
        for text in (b"", b"{", b"[]", b"null", b'{"format": 1}', b'{"uuid": 5, "format": 1}', b"\xff" * 9)
    ),
    *(("current", text, DamagedError) for text in (None, b"", b"gen-0", b"../gen-1", b"gen-7", b"\xff")),
    *((name, FIFO, KvtoolError) for name in ("store.json", "current", "data/gen-1/data.mdb", "data/gen-1/lock.mdb")),
]


@pytest.mark.parametrize(("name", "content", "error"), BROKEN)
def test_broken_file_of_a_store_is_refused(tmp_path: Path, name: str, content: Any, error: Any) -> None:
    path = make_store(tmp_path / "store")
    (path / name).unlink()
    if content is FIFO:
        os.mkfifo(path / name)
    elif content is not None:
        (path / name).write_bytes(content)
    check_refusal(path, error)


def test_every_flipped_bit_of_the_store_file_is_found(tmp_path: Path) -> None:
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


def test_fifos_in_place_of_logs_do_not_hang(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    for name in ("access.log", "served.log"):
        os.mkfifo(path / name)
    with Store.open(path) as store:
        store.note_access([id_of("f0.0")], missed=1)
        store.flush()
        assert read_served(store.path).questions == 0
        with store.writer() as pen:
            assert pen.collect() == 0


def test_killed_creation_is_completed(tmp_path: Path) -> None:
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


def test_leftovers_of_a_killed_compaction_are_removed(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    shutil.copytree(path / "data/gen-1", path / "data/gen-2")
    with Store.open(path) as store:
        check_file(store, "f0")
        with store.writer() as pen:
            pen.compact()
        check_file(store, "f0")
    assert os.listdir(path / "data") == ["gen-2"]  # made anew: what was left is removed by any writer


def test_garbage_in_lock_files_is_ignored(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    (path / "data/gen-1/lock.mdb").write_bytes(os.urandom(5000))
    (path / "writer.lock").write_bytes(os.urandom(50))
    (path / "writer.json").write_bytes(b"\xff{")
    with Store.open(path) as store:
        check_file(store, "f0")
        with store.writer() as pen:
            pen.remove_file("f1")


def test_read_only_store_is_read_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store(tmp_path / "store")
    before = {entry: entry.stat().st_mtime_ns for entry in path.rglob("*")}
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with Store.open(path) as store:
        assert store.read_only
        check_file(store, "f0")
        store.note_access([id_of("f0.0")])
        with refused(KvtoolError), store.writer():
            pass
    assert {entry: entry.stat().st_mtime_ns for entry in path.rglob("*")} == before


@pytest.mark.slow
def test_read_only_mount_is_read_and_not_written(tmp_path: Path) -> None:
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
