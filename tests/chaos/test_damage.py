"""Flipped, cut and swapped bytes: reported, never answered with, never a signal (law 8)."""

from __future__ import annotations

import os
import random
import shutil
from fractions import Fraction
from pathlib import Path

import lmdb
import pytest

from kvtool.core.cache import layout, tables
from kvtool.core.cache.integrity import find_damage, repair, verify
from kvtool.core.cache.store import Store
from kvtool.core.cache.tree import check_data_file
from kvtool.core.errors import DamagedError, StoreFormatError
from tests.chaos.injury import flip_bit
from tests.stores import LAYERS, check_file, id_of, make_store, payload_of, put

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


def stored(path: Path, table: bytes, key: bytes) -> bytes:
    with Store.open(path) as store, store.snapshot() as snapshot:
        value = snapshot.get(table, key)
        assert value is not None
        return bytes(value)


def test_flips_in_the_file_itself(path: Path) -> None:
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
def test_swapped_records(path: Path, other: tuple[str, int]) -> None:
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


def test_a_damaged_record_is_replaced_by_putting_it_again(path: Path) -> None:
    key = tables.record_key(id_of("f0.0"), "raw", 1)
    overwrite(path, tables.RECORDS, key, flip_bit(stored(path, tables.RECORDS, key), 500))
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
def test_any_damaged_row_is_found_and_repaired(tmp_path: Path) -> None:
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


def test_a_document_whose_file_is_damaged_goes(path: Path) -> None:
    key = tables.name_key("f0")
    overwrite(path, tables.FILES, key, flip_bit(stored(path, tables.FILES, key), 70))
    with Store.open(path) as store, store.writer() as pen:
        repair(store, pen, find_damage(store, Fraction(1)))
        with store.snapshot() as snapshot:
            assert [*snapshot.keys(tables.DOCUMENTS)] == [tables.name_key("f1")]


def test_a_damaged_description_is_a_miss(path: Path) -> None:
    key = id_of("f0.0")
    overwrite(path, tables.CHUNKS, key, flip_bit(stored(path, tables.CHUNKS, key), 80))
    with Store.open(path) as store:
        assert not store.has_chunk(key)
        with pytest.raises(DamagedError):
            store.chunk_info(key)


def test_collect_drops_nothing_on_a_damaged_document(path: Path) -> None:
    key = tables.name_key("f0")
    overwrite(path, tables.DOCUMENTS, key, flip_bit(stored(path, tables.DOCUMENTS, key), 80))
    with Store.open(path) as store, store.writer() as pen:
        with pytest.raises(DamagedError):
            pen.collect()
        assert len(store.chunk_ids()) == 4


def test_every_truncation_of_the_data_file(path: Path) -> None:
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


def test_cut_while_open(path: Path) -> None:
    """The file is cut under an open store: a short read instead of SIGBUS, where values are read from the file."""
    data = path / "data/gen-1/data.mdb"
    with Store.open(path) as store:
        at = data.read_bytes().index(payload_of("f1.1", LAYERS - 1, dim=DIM)[0])
        with data.open("r+b") as file:
            file.truncate(at + 10)
        with pytest.raises(DamagedError):
            store.read_kv(id_of("f0.0"), "raw", 0)


@pytest.mark.slow
def test_a_file_shorter_than_its_last_page_may_be_whole(tmp_path: Path) -> None:
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


def test_verify_survives_what_kills_its_child(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.core.cache.integrity._CHILD", "import os, signal; os.kill(os.getpid(), signal.SIGBUS)")
    with Store.open(path) as store:
        (found,) = verify(store)
    assert "SIGBUS" in found.reason


def test_damaged_meta_pages(path: Path) -> None:
    data = path / "data/gen-1/data.mdb"
    whole = data.read_bytes()
    for at in (16, 20, 40, 4096 + 16, 4096 + 20):
        data.write_bytes(flip_bit(whole, at))
        with pytest.raises((DamagedError, StoreFormatError)):
            Store.open(path)


@pytest.mark.parametrize(("key", "helps"), [(tables.STORE_KEY, layout.REBUILD), (tables.REVISION_KEY, layout.REPAIR)])
def test_damage_of_what_every_command_reads_says_what_helps(path: Path, key: bytes, helps: str) -> None:
    """The store's own name, and its revision: without either nothing of it is answered."""
    value = stored(path, tables.META, key)
    overwrite(path, tables.META, key, flip_bit(value, len(value) // 2))
    with pytest.raises(DamagedError) as error, Store.open(path) as store:
        store.revision()
    assert error.value.hint == helps
