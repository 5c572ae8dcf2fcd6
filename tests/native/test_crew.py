"""A crew does each share of a job once, with as many threads as were asked for, and alone where nobody helps."""

from __future__ import annotations

import _thread
import ctypes
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from kvtool.core.native import crew, team
from kvtool.core.native.builder import FunctionBuilder, module
from kvtool.core.native.compiling import compiled, runnable
from kvtool.core.native.crew import Crew, current, gathered
from kvtool.core.native.isa import ISAS
from tests.native.test_team import TASKS, counting

pytestmark = pytest.mark.skipif(not runnable() or sys.platform == "win32", reason="there is no crew")


def waiting() -> int:
    """`void run(job)`: adds 1 to job[0] and returns when job[1] is 0."""
    isa = ISAS[runnable()[-1]]
    k = FunctionBuilder("run", isa, "i64* job")
    k.emit("%came = atomicrmw add ptr %job, i64 1 seq_cst")
    again, after = k.new_block(), k.new_block()
    k.branch(again)
    k.begin_block(again)
    value = k.emit_value("i64", f"load atomic i64, ptr {k.args.job.at(1)} seq_cst, align 8")
    k.branch(again, value.ne(0), after)
    k.begin_block(after)
    return compiled(module(k), isa, "run")[0]


@pytest.fixture
def helping(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Holds a number for each helper that has begun and has not ended."""
    there: list[int] = []
    serve = Crew._serve

    def counted(self: Crew) -> None:
        there.append(1)
        serve(self)
        there.pop()

    monkeypatch.setattr(Crew, "_serve", counted)
    return there


def soon(holds: Callable[[], bool]) -> bool:
    """Whether it comes to be: nobody waits for helpers."""
    until = time.monotonic() + 20
    while not holds() and time.monotonic() < until:
        time.sleep(0.001)
    return holds()


def comes_to(there: list[int], count: int) -> bool:
    return soon(lambda: len(there) == count)


@pytest.mark.parametrize("threads", [2, 3, 6])
def test_each_share_of_many_jobs_is_done_once(
    threads: int, helping: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "openmp", lambda: None)
    monkeypatch.setattr(team, "_by_threads", lambda *job: pytest.fail("the crew is passed over"))
    with gathered(threads):
        assert comes_to(helping, threads - 1)
        for _ in range(100):
            job = (ctypes.c_int64 * (TASKS + 2))(0, TASKS)
            team.run_in_team(counting(), ctypes.addressof(job), threads)
            assert list(job[2:]) == [1] * TASKS
    assert comes_to(helping, 0)
    assert current() is None


@pytest.mark.parametrize(("wanted", "expected"), [(2, 2), (3, 3), (9, 4)])
def test_no_more_take_part_than_a_job_has_room_for(wanted: int, expected: int) -> None:
    """Machine code has memory for each of the threads that were asked for."""
    function, job = waiting(), (ctypes.c_int64 * 2)(0, 1)
    with gathered(4):
        caller = current()
        assert caller is not None
        running = threading.Thread(target=caller.run, args=(function, ctypes.addressof(job), wanted))
        running.start()
        until = time.monotonic() + 20
        while job[0] < expected and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.02)  # one too many would have come by now
        came = job[0]
        job[1] = 0
        running.join()
    assert came == expected


def test_who_calls_does_all_where_nobody_comes() -> None:
    code = crew._Code(crew._code().lead, lambda board: None)
    job = (ctypes.c_int64 * (TASKS + 2))(0, TASKS)
    alone = Crew(code, 2)
    alone.run(counting(), ctypes.addressof(job), 3)
    alone.end()
    assert list(job[2:]) == [1] * TASKS


def test_a_crew_belongs_to_its_thread_and_is_made_once(helping: list[int]) -> None:
    seen: list[Crew | None] = []
    with gathered(2):
        outer = current()
        with gathered(3):
            assert current() is outer
        assert current() is outer
        other = threading.Thread(target=lambda: seen.append(current()))
        other.start()
        other.join()
        assert comes_to(helping, 1)
    assert seen == [None]


def test_helpers_end_with_an_error_inside(helping: list[int]) -> None:
    def failing() -> None:
        with gathered(3):
            assert comes_to(helping, 2)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        failing()
    assert current() is None
    assert comes_to(helping, 0)


def test_one_thread_needs_no_helpers(helping: list[int]) -> None:
    with gathered(1):
        assert current() is None
    assert not helping


def test_nobody_waits_for_helpers_that_the_system_does_not_let_run(monkeypatch: pytest.MonkeyPatch) -> None:
    late = threading.Event()
    monkeypatch.setattr(Crew, "_serve", lambda self: late.wait(60))
    job = (ctypes.c_int64 * (TASKS + 2))(0, TASKS)
    with gathered(3):
        team.run_in_team(counting(), ctypes.addressof(job), 3)
    assert list(job[2:]) == [1] * TASKS
    assert not late.is_set()
    late.set()


def test_no_thread_to_be_had_is_no_error(helping: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may have so many only: those that were started before end, and the caller works alone."""
    start, started = _thread.start_new_thread, []

    def one(function: Callable[[], object], given: tuple[()]) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(function)
        start(function, given)

    monkeypatch.setattr(_thread, "start_new_thread", one)
    with gathered(4):
        assert current() is None
        assert len(started) == 1
    monkeypatch.undo()
    assert comes_to(helping, 0)


def test_a_helper_that_nobody_waits_for_keeps_what_it_reads() -> None:
    go_on = threading.Event()
    late = Crew(crew._Code(crew._code().lead, lambda board: go_on.wait(60) and None), 1)
    kept = weakref.ref(late)
    late.end()
    del late
    gc.collect()
    assert kept() is not None
    go_on.set()
    assert soon(lambda: kept() is None)
