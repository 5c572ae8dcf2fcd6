"""A store's folder holds at most a batch more bytes of files than its budget, while it is written to and afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kvtool as package
from kvtool.cli.app import COMMANDS, load_command
from kvtool.core.cache import layout, tables
from kvtool.core.cache.integrity import repair, verify
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.compress.job import compress
from kvtool.core.compress.options import CompressOptions
from kvtool.core.errors import DamagedError, NoSpaceError
from kvtool.core.remote.blobs import open_blobs
from kvtool.core.remote.options import PullOptions
from kvtool.core.remote.pull import pull
from kvtool.core.remote.push import push
from kvtool.core.retrieval.segment import write_tables
from kvtool.core.session.session import Session
from kvtool.core.upkeep.prune import keep_budget
from tests.cli.working import QUESTION, SHORT, damages, kvtool, listing, write_corpus
from tests.compress.making import run
from tests.stores import add_file, check_file, make_store
from tests.wording import refused

DIM = 256  # 32 KiB a layer's K and V: pages of their own
OVER = 2**19  # a batch of two chunks, 64 KiB each, and the pages of the tree that a commit rewrites


class Watcher:
    """The most bytes of files that a folder held at any moment, counted without the store's own code."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.most = self.looks = 0

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._look()
            time.sleep(0.0005)

    def _look(self) -> None:
        self.looks += 1
        self.most = max(self.most, bytes_in(self._root))


def bytes_in(root: Path) -> int:
    total = 0
    for at, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(at, name)).st_size
    return total


def fill(pen: Writer, first: int, most: int = 200) -> int:
    for number in range(first, first + most):
        try:
            add_file(pen, f"f{number}", [f"f{number}.0", f"f{number}.1"], DIM)
        except NoSpaceError:
            return number - first
    raise AssertionError("the budget was never met")


@pytest.mark.parametrize("own", [True, False])
def test_files_of_a_store_keep_to_its_budget(tmp_path: Path, own: bool) -> None:
    path, budget = make_store(tmp_path / "store", files=1, dim=DIM), 2_500_000
    with Store.open(path) as store, Watcher(path) as watcher:
        if own:
            with store.writer() as pen:
                pen.set_budget(budget)
        with store.writer(max_size=None if own else budget) as pen:
            added = fill(pen, 1)
            assert added > 5
            for number in range(1, added):  # every other file leaves a hole between those that stay
                if number % 2:
                    pen.remove_file(f"f{number}")
            pen.collect()
            again = fill(pen, 500)
            assert again > 2  # free pages inside the file are taken
        for number in (0, 2, 4, *range(500, 500 + again)):
            check_file(store, f"f{number}", dim=DIM)
        assert verify(store) == []
    assert watcher.looks > 5
    assert budget * 0.8 < watcher.most <= budget + OVER


def test_a_budget_is_kept_by_the_store(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=2)
    with Store.open(path) as store, store.writer() as pen:
        pen.set_budget(10**6)
    with Store.open(path) as store:
        assert (store.budget(), store.stats()["budget"]) == (10**6, 10**6)
        assert store.stats()["folder_bytes"] == bytes_in(path)
        with store.writer(max_size=10**9) as pen:
            add_file(pen, "large", [f"large.{number}" for number in range(40)], DIM)  # a flag wins for its command
        with store.writer() as pen, refused(NoSpaceError):
            add_file(pen, "more", ["more.0"], DIM)
        with store.writer() as pen:
            pen.set_budget(None)
            add_file(pen, "more", ["more.0"], DIM)
        assert store.budget() is None


def test_room_can_be_made_above_the_budget(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=3, dim=DIM)
    with Store.open(path) as store, store.writer(max_size=1) as pen:
        assert pen.remove_documents(["f0"]) == 1
        assert pen.collect() == 2
        assert pen.drop_level(store.chunk_ids(), "raw") == 4
        assert pen.compact() > 0


def test_free_pages_are_named_where_they_are_the_reason(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=20, dim=DIM)
    with Store.open(path) as store:
        with store.writer() as pen:
            for number in range(1, 20):
                pen.remove_file(f"f{number}")
            pen.collect()
        with store.writer(max_size=300_000) as pen, refused(NoSpaceError):
            add_file(pen, "f50", ["f50.0"], DIM)


def test_a_damaged_budget_stops_writing_and_is_repaired(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=1)
    with Store.open(path) as store:
        with store.writer() as pen:
            pen.set_budget(10**6)
        store.environment.write(lambda write: write.put(tables.META + tables.BUDGET_KEY, b"no budget"), 0)
        with store.writer() as pen, refused(DamagedError):
            add_file(pen, "f1", ["f1.0"])
        with store.writer() as pen:
            assert repair(store, pen, verify(store)) == 1
            add_file(pen, "f1", ["f1.0"])


def test_all_files_of_the_folder_count(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=1)
    before = layout.folder_bytes(path)
    (path / "index").mkdir(exist_ok=True)
    (path / "index" / "vectors").write_bytes(b"v" * 10**6)
    assert layout.folder_bytes(path) == bytes_in(path) == before + 10**6
    with Store.open(path) as store, store.writer(max_size=10**6) as pen, pytest.raises(NoSpaceError):
        add_file(pen, "f1", ["f1.0"])


@pytest.mark.slow
def test_threads_that_read_go_on_while_the_budget_is_met(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=1, dim=DIM)
    stop, rounds, wrong = threading.Event(), [0, 0], []

    def read(store: Store, number: int) -> None:
        try:
            while not stop.is_set():
                check_file(store, "f0", dim=DIM)
                rounds[number] += 1
        except BaseException as error:
            wrong.append(error)

    with Store.open(path) as store:
        threads = [threading.Thread(target=read, args=(store, number)) for number in range(2)]
        for thread in threads:
            thread.start()
        with store.writer(max_size=1_000_000) as pen:
            for number in range(10):
                added = fill(pen, 1 + 100 * number)
                for taken in range(1, added + 1):
                    pen.remove_file(f"f{100 * number + taken}")
                pen.collect()
        stop.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert min(rounds) > 5
    assert bytes_in(path) <= 1_000_000 + OVER  # what a slow reader still holds cannot be taken


def test_a_store_at_its_budget_loads_no_model(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_budget(store, "10kB")
    (tmp_path / "new.md").write_text("A mill that nobody has read of.", encoding="utf-8")
    monkeypatch.setattr(Session, "open", lambda *_, **__: pytest.fail("a model is loaded"))
    kvtool("ingest", tmp_path / "new.md", "--store", store).failed(14, "over its budget", "kvtool store")


# ---- commands ----------------------------------------------------------------------------------------------------


def test_ingest(fresh: Any, tmp_path: Path) -> None:
    path, folder = tmp_path / "fresh", tmp_path / "in"
    write_corpus(folder, 2)
    fresh(folder).fine()
    budget = 2 * bytes_in(path)
    write_corpus(folder, 12)
    with Watcher(path) as watcher:
        done = fresh(folder, "--max-size", str(budget)).fine()
    assert "over its budget" in done.err
    assert 0.7 * budget < watcher.most <= budget
    left = done.json["left"]["chunks"]
    kvtool("store", "prune", "--budget", str(budget), "--store", path).fine()
    with Watcher(path) as watcher:
        assert "the budget with `kvtool store prune --budget SIZE`" in fresh(folder).fine().err
        kvtool("query", QUESTION, "--store", path, *SHORT).fine()
    assert watcher.most <= budget
    assert kvtool("store", "stats", "--store", path, "--json").fine().json["without_kv"] <= left
    assert damages(path) == []
    done = fresh(folder, "--max-size", str(10**9)).fine()  # a flag wins for its command, and it is said
    assert "takes the place of the store's own budget" in done.err
    assert len(listing(path)) == 12


def test_compress(plain: Path) -> None:
    budget = int(1.1 * bytes_in(plain))
    with Watcher(plain) as watcher, pytest.raises(NoSpaceError):
        compress(plain, CompressOptions(levels=("lossless", "1", "2"), questions=0, max_size=budget))
    assert watcher.most <= budget
    assert damages(plain) == []


def test_pull(plain: Path, tmp_path: Path) -> None:
    blobs = open_blobs((tmp_path / "tier").as_uri(), 10.0)
    with Store.open(plain) as store:
        push(store, blobs)
    target, budget = tmp_path / "here", int(0.75 * bytes_in(plain))
    with Store.create_or_open(target):
        pass
    with Watcher(target) as watcher, pytest.raises(NoSpaceError):
        pull(target, blobs, PullOptions(max_size=budget))
    assert watcher.most <= budget
    kvtool("store", "prune", "--budget", str(3 * budget), "--store", target).fine()
    pull(target, blobs)
    assert damages(target) == []
    assert len(listing(target)) == len(listing(plain))
    blobs.close()


def test_the_index_leaves_the_reserve_of_the_disk_alone(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions are answered all the same: the index is made again for each."""
    monkeypatch.setattr(layout, "SMALL_FILE", 0)
    shutil.rmtree(store / "index")
    (store / "index").mkdir()
    monkeypatch.setenv("KVTOOL_DISK_RESERVE", str(2**60))
    with pytest.raises(OSError):
        write_tables(store / "index" / "large.safetensors", {}, {"text": "x"})
    kvtool("query", QUESTION, "--store", store, *SHORT).fine()
    assert not [path for path in (store / "index").rglob("*") if path.is_file()]


_NAMED = re.compile(r"`kvtool ((?:[a-z]+[a-z-]* ?)+)")


def test_every_command_that_a_message_names_exists() -> None:
    known: set[tuple[str, ...]] = set()
    for name in COMMANDS:
        command = load_command(name)
        known.add((name,))
        known |= {(name, inner) for inner in getattr(command, "commands", {})}
    groups = {words[0] for words in known if len(words) == 2}
    named = set()
    for path in Path(package.__file__).parent.rglob("*.py"):
        for found in _NAMED.finditer(path.read_text(encoding="utf-8")):
            words = found[1].split()
            named.add(tuple(words[: 2 if words[0] in groups and len(words) > 1 else 1]))
    assert ("store", "prune") in named
    assert named <= known, sorted(named - known)


def test_the_file_shrinks_when_exact_records_are_dropped(fitted: Path) -> None:
    before = bytes_in(fitted)
    report = run(fitted, "2", keep_raw=False)
    assert report.dropped
    assert report.to_json()["bytes_freed"] > 0
    assert bytes_in(fitted) < before - report.freed // 2
    assert damages(fitted) == []
