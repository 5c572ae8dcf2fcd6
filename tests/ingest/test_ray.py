"""Ray's workers compute what one process computes, a killed one included; a run that ends early leaves whole files.
Clusters that lack workers, Ray or kvtool are refused."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, STDOUT
from types import SimpleNamespace
from typing import Any

import pytest

from kvtool.core.cache.store import Store
from kvtool.core.common.machine import Arithmetic
from kvtool.core.errors import KvtoolError, ModelError, UsageError
from kvtool.core.ingest import ray_storer
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.ray_storer import (
    RayStorer,
    Recipe,
    RemotePrefillWorker,
    Workers,
    WorkerState,
    check_reachable,
    share_of,
)
from kvtool.core.model.options import ModelOptions
from kvtool.core.session.identity import store_identity
from tests.cli.working import (
    CHUNKS,
    PREFIX,
    command,
    damages,
    environment,
    kvtool,
    listing,
    process,
    state,
    write_corpus,
)
from tests.remote.serving import free_port
from tests.serve.conftest import wait_until
from tests.wording import refused

PATIENCE = 300.0  # seconds, for what is started or ended on a machine that does much else
WORKERS = ("--ray", "local", "--ray-workers", "2")


@pytest.fixture
def cluster() -> Iterator[tuple[str, dict[str, str], subprocess.Popen[str]]]:
    """The address of a Ray cluster, the variables by which it lets a process in, and its own process."""
    address, token = f"127.0.0.1:{free_port()}", {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "2"]
    start += ["--port", address.rpartition(":")[2], "--include-dashboard", "false", "--object-store-memory", str(10**8)]
    own = environment(RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=str(Path(__file__).parents[2]), **token)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # names of sockets have to be short
        start += ["--temp-dir", folder]
        child = subprocess.Popen(start, env=own, start_new_session=True, stdout=PIPE, stderr=STDOUT, text=True)
        try:
            assert child.stdout is not None
            said = iter(child.stdout.readline, "")
            assert any("Ray runtime started" in line for line in said)
            yield address, token, child
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                child.communicate(timeout=PATIENCE)
                os.killpg(child.pid, signal.SIGKILL)


def running(mark: str, called: str = "") -> list[str]:
    """Commands of the processes that have the mark in their environment, and this in their command."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another's
            if mark.encode() in (each / "environ").read_bytes():
                found.append((each / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return [command for command in found if called in command]


def left_of(mark: str, called: str = "") -> list[str]:
    deadline = time.monotonic() + 30
    while (found := running(mark, called)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


class Backwards:
    """Workers in this process, of which the last batch is computed first; Ctrl-C comes after so many."""

    def __init__(self, recipe: Recipe, most: int) -> None:
        worker = RemotePrefillWorker(recipe, 0)
        self._actor = SimpleNamespace(compute=SimpleNamespace(remote=worker.compute))
        self.states = [worker.state() for _ in range(2)]
        self.pool, self._most, self._tasks = self, most, list[tuple[Any, Any]]()
        self.is_closed = False

    def has_free(self) -> bool:
        return len(self._tasks) < 3

    def submit(self, call: Any, value: Any) -> None:
        self._tasks.append((call, value))

    def next(self) -> Any:
        if not self._most:
            raise KeyboardInterrupt
        self._most -= 1
        call, value = self._tasks.pop()
        return call(self._actor, value)

    def close(self) -> None:
        self.is_closed = True


def backwards(monkeypatch: pytest.MonkeyPatch, most: int) -> list[Backwards]:
    started: list[Backwards] = []

    def start(options: object, recipe: Recipe) -> Backwards:
        started.append(Backwards(recipe, most))
        return started[-1]

    monkeypatch.setattr(ray_storer, "Workers", start)
    return started


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.core.ingest.storer.BATCH_TOKENS", {"cpu": 64})


@pytest.fixture
def alone(tiny: Path, tmp_path: Path) -> tuple[object, ...]:
    here = ("ingest", write_corpus(tmp_path / "corpus"), "--model", tiny, *CHUNKS, *PREFIX, "--json", "--store")
    kvtool(*here, tmp_path / "alone").fine()
    return here


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches")
def test_workers_make_what_one_process_makes(
    alone: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    plain = RayStorer._take

    def take(storer: RayStorer) -> None:
        if not killed:
            killed.append(storer._workers.states[0].pid)
            os.kill(killed[0], signal.SIGKILL)
        plain(storer)

    monkeypatch.setattr(RayStorer, "_take", take)
    done = kvtool(*alone, tmp_path / "far", *WORKERS)  # what Ray says of the dead worker is on stderr
    assert done.code == 0
    assert len(killed) == 1
    assert done.json["resolved"]["workers"] == 2
    assert state(tmp_path / "far") == state(tmp_path / "alone")


@pytest.mark.usefixtures("small_batches")
def test_interrupted_workers_resume(alone: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = backwards(monkeypatch, most=15)
    kvtool(*alone, tmp_path / "far", *WORKERS).failed(130)
    assert damages(tmp_path / "far") == []
    later = backwards(monkeypatch, most=99)
    done = kvtool(*alone, tmp_path / "far", *WORKERS).fine().json
    assert (done["documents"]["unchanged"], done["chunks"]["computed"] > 0) == (6, True)
    assert [run.is_closed for run in runs + later] == [True, True]
    assert state(tmp_path / "far") == state(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.nightly
def test_workers_of_a_running_cluster(alone: tuple[object, ...], cluster: Any, tmp_path: Path) -> None:
    address, token, child = cluster
    done = process(*alone, tmp_path / "far", "--ray", address, "--ray-workers", "2", **token).fine().json
    assert (done["resolved"]["workers"], done["warnings"]) == (2, [])
    assert state(tmp_path / "far") == state(tmp_path / "alone")
    assert left_of(token["RAY_AUTH_TOKEN"], "ray::RemotePrefillWorker") == []
    assert child.poll() is None


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_sigint_and_sigterm(number: signal.Signals, word: str, tiny: Path, tmp_path: Path) -> None:
    """The one reaches all processes of the run at once, the other only the first: none is left, what was committed
    stays, the next run continues."""
    corpus, store, mark = write_corpus(tmp_path / "corpus", documents=200), tmp_path / "store", str(tmp_path)
    args = ("ingest", corpus, "--store", store, "--model", tiny, *CHUNKS, *PREFIX, "--json")
    far, own = command(*args, *WORKERS), environment(RUN_OF_A_TEST=mark)
    with subprocess.Popen(far, env=own, start_new_session=True, stdout=PIPE, stderr=PIPE, text=True) as child:
        try:
            wait_until(lambda: running(mark, "ray::RemotePrefillWorker"))
            (os.killpg if number == signal.SIGINT else os.kill)(child.pid, number)
            out, err = child.communicate(timeout=PATIENCE)
            assert left_of(mark) == []
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 128 + number, err
    assert f"error: {word}\nhint: what was committed stays; run the same command again" in err
    assert f'"exit_code": {128 + number}' in out
    kept = len(listing(store))
    assert kept > 0
    assert damages(store) == []
    again = kvtool(*args).fine().json
    assert (again["documents"]["unchanged"], again["documents"]["added"]) == (kept, 200 - kept)
    assert damages(store) == []


def test_noted_arithmetic(alone: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (*alone[:-1], "--store-dtype", "float32", "--dtype", "bfloat16", "--store")
    kvtool(*command, tmp_path / "own").fine()
    backwards(monkeypatch, most=99)
    state_of, others = RemotePrefillWorker.state, iter(["bfloat16", "float32"])
    monkeypatch.setattr(RemotePrefillWorker, "state", lambda self: replace(state_of(self), dtype=next(others)))
    done = kvtool(*command, tmp_path / "far", *WORKERS).fine().json
    assert done["warnings"] == ["workers compute in bfloat16 on cpu and float32 on cpu: each chunk notes its own"]
    assert state(tmp_path / "far") == state(tmp_path / "own")
    with Store.open(tmp_path / "far") as store:
        infos = [store.chunk_info(chunk) for chunk in store.chunk_ids()]
    assert {info.arithmetic for info in infos if info is not None} == {Arithmetic("bfloat16", "cpu")}


def test_a_worker_says_what_is_wrong_with_its_model(alone: tuple[object, ...], tmp_path: Path) -> None:
    with Store.open(tmp_path / "alone") as store:
        identity = store_identity(store)
    other = replace(identity, fingerprint="0" * 64)
    with refused(ModelError):
        RemotePrefillWorker(Recipe(other, ModelOptions(model=identity.model), "raw"), 0).state()
    with pytest.raises(ModelError):
        RemotePrefillWorker(Recipe(identity, ModelOptions(model=str(tmp_path / "gone")), "raw"), 0).state()


def test_an_address_without_a_cluster_leaves_no_store(tiny: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 1)
    args = ("ingest", corpus, "--model", tiny, "--store", tmp_path / "store", "--ray", "127.0.0.1:1")
    kvtool(*args).failed(1, "Ray does not answer at '127.0.0.1:1'", "--ray local")
    assert not (tmp_path / "store").exists()


def test_what_a_cluster_has_not_is_refused() -> None:
    assert [share_of({"CPU": 32}, 0, "auto").workers, share_of({"CPU": 2}, 0, "auto").workers] == [4, 1]
    shared = share_of({"CPU": 64, "GPU": 4}, 0, "auto")
    assert (shared.workers, shared.gpus) == (4, 1)
    assert share_of({"CPU": 64, "GPU": 4}, 2, "cpu").cpus == 32
    for cpus, device in ((64, "cuda"), (2, "cpu")):
        with refused(UsageError, numbers=True):
            share_of({"CPU": cpus, "GPU": 2}, 3, device)
    with refused(UsageError):
        IngestOptions(ray_workers=2)


def test_unreachable_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("127.0.0.1:1", "nonsense:xx", "[::1"):
        with pytest.raises(KvtoolError) as told:
            check_reachable(address)
        assert "--ray local" in told.value.hint
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused(KvtoolError):
        check_reachable("local")


def test_a_worker_of_another_version_is_refused() -> None:
    states = [WorkerState("0.0.9", "tiny", "cpu", "float32", 1)]
    workers = Workers.__new__(Workers)
    workers._ray = SimpleNamespace(get=lambda references: states, exceptions=pytest.importorskip("ray").exceptions)
    with refused(KvtoolError):
        workers._states([])


@pytest.mark.slow
def test_workers_that_cannot_import_kvtool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(_WITHOUT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    recipe: Any = {}
    with refused(KvtoolError):
        Workers(IngestOptions(ray="local", ray_workers=1, device="cpu"), recipe)


_WITHOUT = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "kvtool":
            raise ModuleNotFoundError("No module named 'kvtool'", name=name)

sys.meta_path.insert(0, Without())
"""
