"""Journals next to the records: many writers, bounded, and whole lines only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest

from kvtool.core.cache import side_files
from kvtool.core.cache.integrity import find_damage, repair
from kvtool.core.cache.side_files import SideLog, append_side, read_side_log
from kvtool.core.cache.store import Store
from tests.cache.making import make_store
from tests.faults.running import start

NAME = "audit/both.jsonl"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(make_store(tmp_path / "store")) as opened:
        yield opened


def numbers(store: Store) -> list[int]:
    return [value["number"] for value in read_side_log(store, NAME).values]


def test_what_is_appended_is_read_in_order(store: Store) -> None:
    assert read_side_log(store, NAME) == SideLog()
    values = [{"number": number, "text": "Mühle\u2028\n", "float": 0.1} for number in range(3)]
    assert all(append_side(store, NAME, value) for value in values)
    assert read_side_log(store, NAME) == SideLog(tuple(values))
    path = store.side_file(NAME)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("torn", [1, 20])
def test_a_torn_line_is_passed_over_and_the_next_one_is_whole(store: Store, torn: int) -> None:
    for number in range(3):
        append_side(store, NAME, {"number": number})
    path = store.side_file(NAME)
    path.write_bytes(path.read_bytes()[:-torn])
    append_side(store, NAME, {"number": 3})
    log = read_side_log(store, NAME)
    assert [value["number"] for value in log.values] == ([0, 1, 3] if torn > 1 else [0, 1, 2, 3])
    assert log.damaged == (torn > 1)


def test_every_flipped_byte_is_found(store: Store) -> None:
    for number in range(2):
        append_side(store, NAME, {"number": number})
    path = store.side_file(NAME)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        log = read_side_log(store, NAME)
        assert log.damaged >= 1
        assert all(value in ({"number": 0}, {"number": 1}) for value in log.values)


def test_it_stays_bounded_and_keeps_the_newest(store: Store) -> None:
    for number in range(200):
        assert append_side(store, NAME, {"number": number}, most=2000)
        assert store.side_file(NAME).stat().st_size <= 2000
    kept = numbers(store)
    assert kept == list(range(kept[0], 200))
    assert len(kept) > 10


def test_dropping_the_older_half_drops_what_is_damaged(store: Store) -> None:
    append_side(store, NAME, {"number": 0})
    path = store.side_file(NAME)
    path.write_bytes(b"no JSON\n[]\n" + path.read_bytes())
    assert read_side_log(store, NAME).damaged == 2
    append_side(store, NAME, {"number": 1}, most=path.stat().st_size)
    assert read_side_log(store, NAME).damaged == 0
    assert numbers(store)[-1] == 1


def test_several_threads_and_processes_at_once(store: Store) -> None:
    workers = [start(store.path, "log", word, "40") for word in "ab"]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda number: append_side(store, NAME, {"number": number, "word": "c"}), range(40)))
    for worker in workers:
        assert worker.communicate(timeout=60)[0] == ""
    log = read_side_log(store, NAME)
    assert log.damaged == 0
    assert sorted((value["word"], value["number"]) for value in log.values) == [
        (word, number) for word in "abc" for number in range(40)
    ]


def test_what_cannot_be_written_is_said_and_left(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    append_side(store, NAME, {"number": 0})
    path = store.side_file(NAME)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "read_only", True)
        assert not append_side(store, NAME, {"number": 1})
    with monkeypatch.context() as patch:
        patch.setattr(side_files, "check_file", _full)
        assert not append_side(store, NAME, {"number": 1})
    assert path.read_bytes() == before
    path.unlink()
    os.mkfifo(path)  # opening or reading it as a file would wait for ever
    assert not append_side(store, NAME, {"number": 1})
    assert read_side_log(store, NAME) == SideLog()


def test_only_the_newest_of_one_that_is_too_long_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        append_side(store, NAME, {"number": number})
    monkeypatch.setattr(side_files, "LOG_BYTES", 500)
    read = numbers(store)
    assert read == list(range(read[0], 50))
    assert 5 <= len(read) <= 10
    assert read_side_log(store, NAME).damaged == 0


# ---- verify and repair -------------------------------------------------------------------------------------------


def test_damaged_lines_are_found_and_dropped_and_the_others_stay(store: Store) -> None:
    for number in range(3):
        append_side(store, NAME, {"number": number})
    assert found(store) == []
    path = store.side_file(NAME)
    data = path.read_bytes()
    path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:] + b'{"digest": ')
    assert found(store) == ["audit/both.jsonl has 2 lines that cannot be read"]
    assert repaired(store) == 1
    assert found(store) == []
    assert numbers(store) == [1, 2]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("elsewhere", path)])
def test_what_is_no_file_goes(store: Store, make: Callable[[Path], None], tmp_path: Path) -> None:
    make(store.side_file(NAME))
    assert not append_side(store, NAME, {"number": 0})
    (reason,) = found(store)
    assert "is not a regular file" in reason
    repaired(store)
    assert found(store) == []
    assert append_side(store, NAME, {"number": 1})


def found(store: Store) -> list[str]:
    return [damage.reason for damage in find_damage(store, Fraction(1))]


def repaired(store: Store) -> int:
    with store.writer() as writer:
        return repair(store, writer, find_damage(store, Fraction(1)))


def _full(*args: object) -> None:
    raise OSError(28, "No space left on device")
