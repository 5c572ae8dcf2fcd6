"""Ingests that meet each other, a lock or a full disk (law 9); those that are killed are in test_injected."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from kvtool.core.cache.store import Store
from tests.cli.working import CHUNKS, PREFIX, QUESTION, SHORT, damages, kvtool, listing, process, write_corpus
from tests.faults.running import limit_files, start_kvtool


def names(path: Path) -> set[str]:
    """Documents that are committed."""
    try:
        with Store.open(path) as store:
            return set(store.sources())
    except Exception:  # not made yet
        return set()


@pytest.mark.slow
def test_two_ingests_at_once(tiny: Path, tmp_path: Path) -> None:
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
def test_ctrl_c_while_waiting_for_the_lock(store: Path, tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_a_full_disk_by_a_file_limit(tiny: Path, tmp_path: Path) -> None:
    """The very error of a full disk, from the kernel, through the command; the next run has room."""
    folder, path = write_corpus(tmp_path / "in", documents=60, paragraphs=3), tmp_path / "store"
    args = ("ingest", folder, "--store", path, "--model", tiny, *CHUNKS, *PREFIX)
    done = limit_files(5000, *args)
    assert done.returncode == 14, done.stderr
    assert "\nerror: " in f"\n{done.stderr}"  # after a line about a slow step
    assert "no space" in done.stderr
    assert damages(path) == []
    kept = len(listing(path))
    assert 0 < kept < 60
    assert kvtool(*args, "--json").fine().json["documents"]["unchanged"] == kept
    assert process("store", "verify", "--store", path).code == 0


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A corpus that is half ingested."""
    folder = write_corpus(tmp_path / "in", 3, 2)
    where = ("--store", tmp_path / "store", "--model", tiny)
    kvtool("ingest", folder, *where, *CHUNKS, *PREFIX).fine()
    kvtool("query", QUESTION, "--store", tmp_path / "store", *SHORT).fine()
    return write_corpus(tmp_path / "in", 6, 2)


@pytest.mark.slow
def test_two_ingests_and_ten_questions_at_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    store, log = str(tmp_path / "store"), tmp_path / "log.jsonl"
    prebuild = ["ingest", str(folder), "--store", store, "--quiet", "--sync", "--lock-wait", "10m", "--log", str(log)]
    ask = ["query", QUESTION, "--store", store, "--json", *SHORT]
    for args, child in [(args, start_kvtool(*args)) for args in (prebuild, prebuild, *[ask] * 10)]:
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, (args, err)
        if args is ask:
            assert json.loads(out)["chunks"]
        else:
            assert (out, err) == ("", "")
    assert len(listing(tmp_path / "store")) == 6
    assert damages(tmp_path / "store") == []
    summaries = [event for event in map(json.loads, log.read_text().splitlines()) if event["type"] == "summary"]
    assert sorted(event["documents"]["added"] for event in summaries) == [0, 3]
    assert len({event["pid"] for event in summaries} - {os.getpid()}) == 2
