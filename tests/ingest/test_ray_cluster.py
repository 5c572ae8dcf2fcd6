"""Refusals of clusters that lack workers, Ray or kvtool."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtool.core.common.installing import extra_line
from kvtool.core.errors import KvtoolError, UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.ray_storer import Workers, WorkerState, check_reachable, share_of


def test_what_a_cluster_has_not_is_refused() -> None:
    assert [share_of({"CPU": 32}, 0, "auto").workers, share_of({"CPU": 2}, 0, "auto").workers] == [4, 1]
    shared = share_of({"CPU": 64, "GPU": 4}, 0, "auto")
    assert (shared.workers, shared.gpus) == (4, 1)
    assert share_of({"CPU": 64, "GPU": 4}, 2, "cpu").cpus == 32
    with pytest.raises(UsageError, match="3 workers, and Ray has 2 GPUs"):
        share_of({"CPU": 64, "GPU": 2}, 3, "cuda")
    with pytest.raises(UsageError, match="3 workers, and Ray has 2 CPUs"):
        share_of({"CPU": 2, "GPU": 2}, 3, "cpu")
    with pytest.raises(UsageError, match="none are asked for"):
        IngestOptions(ray_workers=2)


def test_unreachable_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("127.0.0.1:1", "nonsense:xx", "[::1"):
        with pytest.raises(KvtoolError, match="does not answer") as told:
            check_reachable(address)
        assert "--ray local" in told.value.hint
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(KvtoolError, match="needs the package ray") as told:
        check_reachable("local")
    assert told.value.hint == extra_line("ray")


def test_a_worker_of_another_version_is_refused() -> None:
    states = [WorkerState("0.0.9", "tiny", "cpu", "float32", 100, 4, 1)]
    workers = Workers.__new__(Workers)
    workers._ray = SimpleNamespace(get=lambda references: states, exceptions=pytest.importorskip("ray").exceptions)
    with pytest.raises(KvtoolError, match=r"have kvtool 0\.0\.9, and this is"):
        workers._states([])


@pytest.mark.slow
def test_workers_that_cannot_import_kvtool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(_WITHOUT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    recipe: Any = {}
    with pytest.raises(KvtoolError, match=r"cannot run kvtool .*No module named 'kvtool'") as told:
        Workers(IngestOptions(ray="local", ray_workers=1, device="cpu"), recipe)
    assert "install this version" in told.value.hint


_WITHOUT = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "kvtool":
            raise ModuleNotFoundError("No module named 'kvtool'", name=name)

sys.meta_path.insert(0, Without())
"""
