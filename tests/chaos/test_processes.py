"""Two processes and one store: growth, locks, signals, and writers killed anywhere (laws 6 and 9)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool.core.cache.integrity import verify
from kvtool.core.cache.store import Store
from kvtool.core.errors import StoreLockedError
from kvtool.core.ingest.watcher import Watcher
from tests.chaos.processes import command, run, start, start_kvtool
from tests.cli.working import CHUNKS, PREFIX, QUESTION, SHORT, damages, kvtool, listing, write_corpus
from tests.stores import add_file, check_file, make_store

LONG = 120  # seconds: other tests run at the same time


def end(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=60)
    return child.returncode, out, err


@contextlib.contextmanager
def held(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the writer lock."""
    holder = start(path, "hold", 20)
    try:
        yield holder
    finally:
        holder.kill()
        end(holder)


@pytest.mark.slow
def test_reader_follows_growth_by_another_process(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", files=1, dim=256)
    reader = start(path, "watch", "f20", KVTOOL_MAP_LIMIT=str(2**17))
    writer = run(path, "add", 1, 20, 2, 256)
    assert writer.returncode == 0, writer.stderr
    assert end(reader) == (0, "", "")


def test_reader_does_not_wait_for_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_store(tmp_path / "store")
    with Store.open(path) as store, store.writer() as pen:
        environment = store.environment

        def inside(transaction: object) -> None:
            found = run(path, "read")  # a whole other process, opening included, inside our write transaction
            assert (found.returncode, found.stdout) == (0, "2 False True\n"), found.stderr

        environment.write(inside, 0)
        add_file(pen, "f2", ["f2.0"])


@pytest.mark.slow
def test_second_writer_names_the_holder_of_the_lock(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    with held(path) as holder:
        second = run(path, "lock", 0)
        assert second.returncode == 11
        assert f"process {holder.pid} (storework.py" in second.stderr
        assert "--lock-wait" in second.stderr
        began = time.monotonic()
        assert run(path, "lock", 0.5).returncode == 11
        assert time.monotonic() - began > 0.5
    assert run(path, "lock", 0).returncode == 0  # the kernel drops a dead holder's lock


@pytest.mark.slow
def test_writer_waits_for_the_lock(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    holder = start(path, "hold", 0.7)
    second = run(path, "lock", 20)
    assert second.returncode == 0, second.stderr
    assert end(holder)[0] == 0


def test_two_writers_in_one_process(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store")
    with Store.open(path) as one, Store.open(path) as two, one.writer():
        with pytest.raises(StoreLockedError), two.writer():
            pass
        check_file(two, "f0")


def test_concurrent_creation_of_a_store(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "store"
    children = [
        subprocess.Popen(command(path, "add", first, 2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for first in (0, 10, 20)
    ]
    for child in children:
        code, _, err = end(child)
        assert code == 0, err
    with Store.open(path) as store:
        assert store.sources() == ["f0", "f1", "f10", "f11", "f20", "f21"]


@pytest.mark.slow
def test_killed_writers_lose_no_committed_file(tmp_path: Path) -> None:
    """Twenty kills at random moments, creation included; then the run that completes. Seeded, yet never the same."""
    path, moments = tmp_path / "store", random.Random(7)
    committed: set[str] = set()
    for turn in range(20):
        child = subprocess.Popen(command(path, "add", 10 * turn, 200, 2, 64), stdout=subprocess.PIPE, text=True)
        if turn >= 5:  # the first ones die at start or while the store is made
            assert child.stdout is not None
            assert child.stdout.readline() == "start\n"
        time.sleep(moments.uniform(0.0, 0.12) + 0.1 * (turn < 5))
        child.kill()
        out = child.communicate()[0]
        committed |= {line for line in out.split("\n")[:-1] if line.startswith("f")}
    assert committed
    done = run(path, "add", 0, 5, 2, 64)
    assert done.returncode == 0, done.stderr
    with Store.open(path) as store:
        for name in committed | {f"f{number}" for number in range(5)}:
            check_file(store, name, dim=64)
        assert verify(store) == []
        with store.writer() as pen:
            assert pen.collect() <= 4 * 20  # what the killed ones had not finished
        assert verify(store) == []


# ---- the command ---------------------------------------------------------------------------------------------


def names(path: Path) -> set[str]:
    """Documents that are committed."""
    try:
        with Store.open(path) as store:
            return set(store.sources())
    except Exception:  # not made yet
        return set()


@pytest.mark.slow
def test_concurrent_ingests_and_a_query(tiny: Path, tmp_path: Path) -> None:
    """The second reports the process that holds the store, or waits; queries do neither."""
    one, path = write_corpus(tmp_path / "one", documents=120, paragraphs=3), tmp_path / "store"
    (tmp_path / "two.txt").write_text("The last mill was built by nobody.")
    args = ("--store", path, "--model", tiny, *CHUNKS, *PREFIX)
    with start_kvtool("ingest", one, *args) as first:
        while not names(path):
            assert first.poll() is None, first.communicate()
            time.sleep(0.005)
        refused = kvtool("ingest", tmp_path / "two.txt", *args, "--lock-wait", "0")
        refused.failed(11, f"process {first.pid}", "--lock-wait")
        kvtool("query", QUESTION, "--store", path, *SHORT).fine()  # reads what is committed by now
        waited = kvtool("ingest", tmp_path / "two.txt", *args, "--lock-wait", "60", "--json").fine().json
        assert waited["documents"]["added"] == 1
        _, err = first.communicate(timeout=60)
        assert first.returncode == 0, err
    assert len(listing(path)) == 121
    assert damages(path) == []


def open_files(pid: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(link))
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_sigint_of_an_ingest_that_waits_for_the_lock(store: Path, tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_text("A new mill.")
    with Store.open(store) as held, held.writer():
        child = start_kvtool("ingest", tmp_path / "new.txt", "--store", store, "--lock-wait", "60")
        while not any("data.mdb" in file for file in open_files(child.pid)):
            assert child.poll() is None, child.communicate()
            time.sleep(0.02)
        time.sleep(0.2)  # it tries to take the lock at once
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert out == ""
    waits, interrupted, hint, *_ = err.splitlines()
    assert waits.startswith(f"waiting: {store} is being written by process {os.getpid()} ")
    assert (interrupted, hint[:6]) == ("error: interrupted", "hint: ")
    assert len(listing(store)) == 6


# ---- watch ----


class Process:
    """A watch, its lines on stdout and stderr in the order in which they come."""

    def __init__(self, *args: object) -> None:
        self.child = start_kvtool("watch", *args, stderr=subprocess.STDOUT)
        self.said: list[str] = []

    def wait_for(self, text: str) -> None:
        """Read on until a line has this text."""
        assert self.child.stdout is not None
        late = threading.Timer(LONG, self.child.kill)
        late.start()
        try:
            while line := self.child.stdout.readline():
                self.said.append(line)
                if text in line:
                    return
        finally:
            late.cancel()
        pytest.fail(f"{text!r} was not said: {self.said}")

    def end(self, number: signal.Signals) -> int:
        self.child.send_signal(number)
        return self.child.wait(LONG)


@pytest.fixture
def watch(tiny: Path, tmp_path: Path) -> Iterator[Process]:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("The first mill grinds flour.")
    where = ("--store", tmp_path / "store", "--model", tiny, "--debounce", "0.1")
    process = Process(tmp_path / "docs", *where, *CHUNKS, *PREFIX)
    process.wait_for("watching")
    yield process
    process.end(signal.SIGKILL)
    assert process.child.stdout is not None
    process.child.stdout.close()


@pytest.mark.slow
def test_watch_follows_changes_until_sigterm(watch: Process, tmp_path: Path) -> None:
    docs, store = tmp_path / "docs", tmp_path / "store"
    (docs / "한국어.md").write_text("물레방아는 밀을 빻는다.")
    watch.wait_for(f"added {docs / '한국어.md'}: 1 chunk")
    (docs / "a.md").unlink()
    watch.wait_for(f"removed {docs / 'a.md'}")
    kvtool("ingest", docs, "--store", store, "--sync", "--lock-wait", "2m").fine()  # as cron does it
    assert watch.end(signal.SIGTERM) == 143
    watch.wait_for("no longer watching: 2 added, 0 changed, 1 removed")
    assert [Path(document["source"]).name for document in listing(store)] == ["한국어.md"]
    assert damages(store) == []


def test_watch_refuses_json(tmp_path: Path) -> None:
    kvtool("watch", tmp_path, "--store", tmp_path / "store", "--json").failed(2, "--jsonl")


def test_watch_ends_on_sigint(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.md").write_text("The first mill grinds flour.")

    def interrupted(watcher: Watcher) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Watcher, "wait", interrupted)
    done = kvtool("watch", tmp_path / "a.md", "--store", tmp_path / "store", "--model", tiny, *CHUNKS, *PREFIX)
    assert done.code == 130
    assert "no longer watching: 1 added, 0 changed, 0 removed" in done.err
    assert "error" not in done.err
