"""Machine code in several threads: every share of the work is done once, with OpenMP or without."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from kvtool.core.native import team
from kvtool.core.native.compiling import compiled, runnable
from kvtool.core.native.ir import Body, Loop
from kvtool.core.native.isa import ISAS

pytestmark = pytest.mark.skipif(not runnable(), reason="there is no compiler")
TASKS = 1000


def counting() -> int:
    """`void run(job)`: takes tasks by the counter at job[0] until job[1] are taken, and adds 1 to job[2 + task]."""
    body = Body()
    tasks = body.load("i64", body.at("i64", "%job", 1))
    each = Loop(body, tasks)
    task = body("atomicrmw add ptr %job, i64 1 monotonic")
    some, after = body.new_block(), body.new_block()
    body.do(f"br i1 {body(f'icmp ult i64 {task}, {tasks}')}, label %{some}, label %{after}")
    body.enter(some)
    place = body.at("i64", "%job", body(f"add i64 {task}, 2"))
    body.store("i64", body(f"add i64 {body.load('i64', place)}, 1"), place)
    body.do(f"br label %{after}")
    body.enter(after)
    each.close()
    body.do("ret void")
    text = f"define void @run(ptr %job) {{\n{body.text()}\n}}\n"
    return compiled(text, ISAS[runnable()[-1]], "run")[0]


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
