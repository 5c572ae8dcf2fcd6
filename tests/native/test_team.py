"""Machine code in several threads: every share of the work is done once, with OpenMP or without."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from kvtool.core.native import team
from kvtool.core.native.builder import FunctionBuilder, module
from kvtool.core.native.compiling import compiled, runnable
from kvtool.core.native.isa import ISAS

pytestmark = pytest.mark.skipif(not runnable(), reason="there is no compiler")
TASKS = 1000


def counting() -> int:
    """`void run(job)`: takes tasks by the counter at job[0] until job[1] are taken, and adds 1 to job[2 + task]."""
    isa = ISAS[runnable()[-1]]
    k = FunctionBuilder("run", isa, "i64* job")
    tasks = k.args.job.load(1)
    with k.loop(tasks):
        task = k.atomic_add(k.args.job, 1)
        with k.when(task < tasks):
            place = k.args.job.at(task + 2)
            place.store(place.load() + 1)
    return compiled(module(k), isa, "run")[0]


@pytest.mark.parametrize("found", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_share_is_done_once(threads: int, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not found:
        monkeypatch.setattr(team, "openmp", lambda: None)
    job = (ctypes.c_int64 * (TASKS + 2))(0, TASKS)
    team.run_in_team(counting(), ctypes.addressof(job), threads)
    assert list(job[2:]) == [1] * TASKS


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings another OpenMP there")
def test_openmp_is_found_without_a_copy_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = team.openmp()
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter(()))
    found = team.openmp.__wrapped__()
    assert usual is not None
    assert found is not None
    assert (found.barrier, found.number, found.threads) == (usual.barrier, usual.number, usual.threads)
