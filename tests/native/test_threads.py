"""A pool does each share of a job once, with as many threads as were asked for, or in the caller's thread only."""

from __future__ import annotations

import _thread
import ctypes
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtool.core.native import threads
from kvtool.core.native.builder import FunctionBuilder, module
from kvtool.core.native.isa import ISAS, runnable
from kvtool.core.native.jit import Function, compiled
from kvtool.core.native.threads import (
    Barrier,
    ThreadPool,
    atomic_load,
    barrier,
    current,
    launch,
    launch_in_pool,
    use_pool,
)

TASKS = 1000


def counting() -> Function:
    """`run(job)`: takes tasks by the counter at job[0] until job[1] are taken, and adds 1 to job[2 + task]."""
    isa = ISAS[runnable()[-1]]
    k = FunctionBuilder("run", isa, "i64* job")
    tasks = k.args.job.load(1)
    with k.loop(tasks):
        task = k.atomic_add(k.args.job, 1)
        with k.when(task < tasks):
            place = k.args.job.at(task + 2)
            place.store(place.load() + 1)
    return compiled(module(k), isa, "run")[0]


def new_job() -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * (TASKS + 2))(0, TASKS)


def waiting() -> Function:
    """`run(job)`: adds 1 to job[0] and returns when job[1] is 0."""
    isa = ISAS[runnable()[-1]]
    k = FunctionBuilder("run", isa, "i64* job")
    k.atomic_add(k.args.job, 1, "seq_cst")
    again, after = k.new_block(), k.new_block()
    k.branch(again)
    k.begin_block(again)
    k.branch(again, atomic_load(k.args.job.at(1)).ne(0), after)
    k.begin_block(after)
    return compiled(module(k), isa, "run")[0]


def meeting(rounds: int) -> Function:
    """`run(job)` of job[0] threads with the barrier job[1]: adds 1 to job[2] in each round, then 1 to job[3] if the
    others have not all done so."""
    isa = ISAS[runnable()[-1]]
    k = FunctionBuilder("run", isa, "i64* job")
    number, memory = k.args.job.load(0), k.args.job.at(1).of("ptr").load()
    with k.loop(rounds) as index:
        k.atomic_add(k.args.job.at(2), 1)
        k.call_void("barrier", memory, number)
        with k.when(atomic_load(k.args.job.at(2)).ne((index + 1) * number)):
            k.atomic_add(k.args.job.at(3), 1)
        k.call_void("barrier", memory, number)
    return compiled(module(barrier(isa), k), isa, "run")[0]


@pytest.fixture(autouse=True)
def _no_pool_is_left() -> Iterator[None]:
    """Tests begin without pools, and end those that they have made."""
    threads._idle.clear()
    yield
    while threads._idle:
        threads._idle.pop().end()


@pytest.fixture
def helping(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Holds a number for each helper that has begun and has not ended."""
    there: list[int] = []
    serve = ThreadPool._worker

    def counted(self: ThreadPool) -> None:
        there.append(1)
        serve(self)
        there.pop()

    monkeypatch.setattr(ThreadPool, "_worker", counted)
    return there


def soon(holds: Callable[[], bool]) -> bool:
    """Return True if a condition holds within 20 s: a pool does not wait for its helpers."""
    until = time.monotonic() + 20
    while not holds() and time.monotonic() < until:
        time.sleep(0.001)
    return holds()


def comes_to(there: list[int], count: int) -> bool:
    return soon(lambda: len(there) == count)


@pytest.mark.parametrize("way", [launch, launch_in_pool])
@pytest.mark.parametrize("found", [True, False])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_each_share_is_done_once(
    number: int, found: bool, way: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not found:
        monkeypatch.setattr(threads, "openmp", lambda: None)
    job = new_job()
    way(counting(), job, number)
    assert list(job[2:]) == [1] * TASKS
    assert current() is None


@pytest.mark.some(1)
@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_threads_meet_at_a_barrier_and_wake_from_any_sleep(number: int) -> None:
    function, meet = meeting(50), Barrier()
    for pause in (*[0.0] * 20, *[0.001] * 20, 0.003, 0.03, 0.2, 0.0, 0.05, *[0.0015] * 50):
        job = (ctypes.c_int64 * 4)(number, meet.address)
        launch_in_pool(function, job, number)
        assert list(job)[2:] == [50 * number, 0]
        time.sleep(pause)


@pytest.mark.parametrize(("wanted", "expected"), [(2, 2), (3, 3), (9, 4)])
def test_no_more_take_part_than_a_job_has_room_for(wanted: int, expected: int) -> None:
    function, job = waiting(), (ctypes.c_int64 * 2)(0, 1)
    with use_pool(4) as pool:
        assert pool is not None
        running = threading.Thread(target=pool.run, args=(function, ctypes.addressof(job), wanted))
        running.start()
        soon(lambda: job[0] >= expected)
        time.sleep(0.02)  # one too many would have come by now
        came = job[0]
        job[1] = 0
        running.join()
    assert came == expected


def test_a_pool_belongs_to_its_thread_and_is_used_again(helping: list[int]) -> None:
    seen: list[ThreadPool | None] = []

    def elsewhere() -> None:
        with use_pool(2) as pool:
            seen.append(pool)

    with use_pool(2) as outer:
        with use_pool(3) as inner:
            assert current() is outer is inner
        assert current() is outer
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        assert comes_to(helping, 2)
    assert current() is None
    assert seen[0] is not outer
    with use_pool(2) as again:
        assert again in (outer, *seen)
    assert comes_to(helping, 2)


def test_a_pool_is_given_back_after_an_error() -> None:
    def failing() -> None:
        with use_pool(3):
            raise ValueError("inside")

    with pytest.raises(ValueError):
        failing()
    assert current() is None
    assert len(threads._idle) == 1


def test_one_thread_needs_no_helpers(helping: list[int]) -> None:
    with use_pool(1) as pool:
        assert pool is current() is None
    assert not helping


def test_nobody_waits_for_helpers_that_the_system_does_not_let_run(monkeypatch: pytest.MonkeyPatch) -> None:
    late = threading.Event()
    monkeypatch.setattr(ThreadPool, "_worker", lambda self: late.wait(60))
    job = new_job()
    launch_in_pool(counting(), job, 3)
    assert list(job[2:]) == [1] * TASKS
    assert not late.is_set()
    late.set()


def test_no_thread_to_be_had_is_no_error(helping: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = _thread.start_new_thread, []

    def one(function: Callable[[], object], given: tuple[()]) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(function)
        start(function, given)

    monkeypatch.setattr(_thread, "start_new_thread", one)
    with use_pool(4) as pool:
        assert pool is None
        assert len(started) == 1
    monkeypatch.undo()
    assert comes_to(helping, 0)


@pytest.mark.slow
def test_a_helper_that_nobody_waits_for_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(ThreadPool, "_worker", lambda self: go_on.wait(60) and None)
    late = ThreadPool(1)
    kept = weakref.ref(late)
    late.end()
    del late
    gc.collect()
    assert kept() is not None
    go_on.set()
    assert soon(lambda: kept() is None)


def test_the_gil_is_free_meanwhile() -> None:
    holds_the_gil = 4  # FUNCFLAG_PYTHONAPI of ctypes
    assert not type(counting()._call)._flags_ & holds_the_gil


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings another OpenMP there")
def test_openmp_is_found_without_a_copy_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter(()))
    found, job = threads.openmp.__wrapped__(), new_job()
    assert found is not None
    found(counting().address, ctypes.addressof(job), 2, 0)
    assert list(job[2:]) == [1] * TASKS
