"""Ingests that are killed while they make a store (others: test_injected), and ingests that meet (law 9)."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from tests.cli.working import (
    CHUNKS,
    PREFIX,
    QUESTION,
    SHORT,
    command,
    damages,
    environment,
    kvtool,
    listing,
    process,
    write_corpus,
)

WARM = ["kvtool.core.ingest.storer", "kvtool.cli.ingest", "transformers.models.llama.modeling_llama"]


@pytest.fixture(scope="module")
def processes() -> Any:
    """Children that have torch already: a kill must not wait seconds for the import it interrupts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*WARM, "kvtool.core.session.gate", "kvtool.core.checkpoint.load"])
    return context


def run_main(args: list[str], home: str, error: str) -> None:
    """What a child runs."""
    os.environ.update(KVTOOL_HOME=home, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    from kvtool.cli.app import main

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = open(error, "w")  # noqa: SIM115
    sys.exit(main(args))


def names(path: Path) -> set[str]:
    """Documents that are committed."""
    try:
        with Store.open(path) as store:
            return set(store.sources())
    except Exception:  # not made yet
        return set()


@pytest.mark.slow
def test_killed_while_the_store_is_made(processes: Any, tiny: Path, tmp_path: Path, home: Path) -> None:
    folder, moments = write_corpus(tmp_path / "in", documents=2), random.Random(6)
    args = ["ingest", str(folder), "--model", str(tiny), *CHUNKS, *PREFIX]
    for turn in range(8):
        path = tmp_path / f"store{turn}"
        child = processes.Process(
            target=run_main, args=([*args, "--store", str(path)], str(home), str(tmp_path / "err"))
        )
        child.start()
        while child.is_alive() and not path.exists():
            time.sleep(0.0005)
        time.sleep(moments.uniform(0, 0.03))
        child.kill()
        child.join()
        kvtool(*args, "--store", path).fine()
        assert damages(path) == []
        assert len(listing(path)) == 2


def start(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


@pytest.mark.slow
def test_two_ingests_at_once(tiny: Path, tmp_path: Path) -> None:
    """The second reports the process that holds the store, or waits; queries do neither."""
    one, path = write_corpus(tmp_path / "one", documents=120, paragraphs=3), tmp_path / "store"
    (tmp_path / "two.txt").write_text("The last mill was built by nobody.")
    args = ("--store", path, "--model", tiny, *CHUNKS, *PREFIX)
    with start("ingest", one, *args) as first:
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
        child = start("ingest", tmp_path / "new.txt", "--store", store, "--lock-wait", "60")
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
    words = " ".join(f"'{word}'" for word in command(*args))
    line = f"ulimit -f 5000; trap '' XFSZ; exec {words}"  # blocks of 1024 bytes
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 14, done.stderr
    assert done.stderr.startswith("error: ")
    assert "no space" in done.stderr
    assert damages(path) == []
    kept = len(listing(path))
    assert 0 < kept < 60
    assert kvtool(*args, "--json").fine().json["documents"]["unchanged"] == kept
    assert process("store", "verify", "--store", path).code == 0
