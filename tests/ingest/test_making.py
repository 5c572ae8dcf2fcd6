"""Two ingests at once: the second one says whom it waits for, and takes the model that the first one has chosen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.working import CHUNKS, command, environment, kvtool
from tests.serve.conftest import PATIENCE, wait_until

HOLDING = "import sys; from pathlib import Path; from kvtool.core.cache.store import Store\n"
HOLDING += "with Store.open(Path(sys.argv[1])) as store, store.writer():\n    print('held', flush=True); input()"


def test_an_ingest_names_the_process_that_it_waits_for(store: Path, corpus: Path) -> None:
    words = [sys.executable, "-c", HOLDING, str(store)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        said = f"is being written by process {other.pid}"
        done = kvtool("ingest", corpus, "--store", store, "--lock-wait", "10ms").failed(11, said)
        assert f"waiting: {store} {said}" in done.err
        assert "waiting" not in kvtool("ingest", corpus, "--store", store, "--lock-wait", 0).failed(11, said).err
        other.communicate("\n")
    assert "waiting" not in kvtool("ingest", corpus, "--store", store).fine().err


def test_ingest_waits_for_the_maker(corpus: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names no model, so it would take the default one if it did not."""
    monkeypatch.setenv("KVTOOL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVTOOL_CACHE", raising=False)
    store = tmp_path / "store"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    first = subprocess.Popen(command("ingest", corpus, "--store", store, "--model", tiny, *CHUNKS), **pipes)
    wait_until(lambda: [*(tmp_path / "home" / "cache" / "making").glob("*/writer.json")])
    os.kill(first.pid, signal.SIGSTOP)
    assert not store.exists()
    second = subprocess.Popen(command("ingest", corpus, "--store", store, "--lock-wait", "10m", *CHUNKS), **pipes)
    assert second.stderr is not None
    line = second.stderr.readline()
    os.kill(first.pid, signal.SIGCONT)
    assert line.startswith(f"waiting: {store} is being made by process {first.pid} (")
    for each in (first, second):
        _, err = each.communicate(timeout=PATIENCE)
        assert each.returncode == 0, err
    assert kvtool("inspect", "--store", store, "--json").fine().json["model"] == str(tiny)
