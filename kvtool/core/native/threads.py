"""A pool of threads for machine code, and torch's own OpenMP between products of torch.

An OpenMP team ends when its last thread does: where another program has that core, each of a pass's 200 jobs waits for
the scheduler. In a pool the caller does all of a job that no helper takes. But after a product of torch its threads
spin for a while on the cores that helpers would need: between such products OpenMP is faster.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from ctypes import addressof
from functools import cache
from pathlib import Path

import numpy as np

from kvtool.core.common.machine import ARM, X86
from kvtool.core.native.builder import FunctionBuilder, Value, module
from kvtool.core.native.isa import ISAS, NEON, SCALAR, Isa, runnable
from kvtool.core.native.jit import LINE, Function, Packed, aligned, compile_once, compiled

# Words of 8 bytes that a pool's threads share: the caller writes the first cache line, helpers the second. `turn` is
# odd while a job is open, which takes `places` helpers; `over` ends them.
_WORDS_OF = "turn function job places over yields waits posts inside entered asleep semaphore".split()
_AT = {name: index for index, name in enumerate(_WORDS_OF)}
_WORDS = LINE // 8
_LOOKS = 32  # at the control block before another thread may run
_PATIENCE = 1000  # such rounds without a job, about 1 ms, before a helper sleeps
_MANY = 1000  # looks of a thread that waits for others to finish, before another one may run
_SEMAPHORE = 4 * LINE  # bytes, at least those of a sem_t


class ThreadPool:
    """Threads that help a caller with its jobs; they spin for a while after each, then sleep. Raises RuntimeError."""

    def __init__(self, helpers: int) -> None:
        self._code, self.helpers = _code(), helpers
        self._control, semaphore = aligned(2 * _WORDS, np.int64), aligned(_SEMAPHORE, np.uint8)
        self._kept = semaphore
        self._control_address = self._control.ctypes.data
        for name, address in (_system() | {"semaphore": _new_semaphore(semaphore.ctypes.data)}).items():
            self._control[_AT[name]] = address
        try:
            for _ in range(helpers):  # a `threading.Thread` would be waited for until it has begun
                _thread.start_new_thread(self._worker, ())
        except BaseException:  # no thread left for this user, or Ctrl-C: those that have begun look for jobs
            self.end()
            raise

    def _worker(self) -> None:
        """The thread keeps the control block alive, since no other thread joins it."""
        self._code["worker"](self._control_address)

    def run(self, function: Function, job: int, threads: int) -> None:
        """Call `void function(ptr job)` here and, if they come in time, in up to `threads` - 1 of the helpers."""
        self._code["submit"](self._control_address, function.address, job, threads - 1)

    def end(self) -> None:
        self._control[_AT["over"]] = 1
        self._code["submit"](self._control_address, self._code["nothing"].address, 0, 0)  # for those that sleep


_UNSURE = {"OMP_DYNAMIC", "OMP_THREAD_LIMIT"}  # with these OpenMP may give fewer threads than are asked for
_own = threading.local()
_idle: list[ThreadPool] = []
os.register_at_fork(after_in_child=_idle.clear)  # threads stay with the parent


def current() -> ThreadPool | None:
    pool: ThreadPool | None = getattr(_own, "pool", None)
    return pool


@contextlib.contextmanager
def use_pool(threads: int) -> Iterator[ThreadPool | None]:
    """Give the calling thread a pool inside, unless it has one already or none can be made."""
    pool = None if threads < 2 or current() is not None else _taken(threads - 1)
    if pool is None:
        yield current()
        return
    _own.pool = pool
    try:
        yield pool
    finally:
        _own.pool = None
        _idle.append(pool)


def _taken(helpers: int) -> ThreadPool | None:
    with contextlib.suppress(IndexError):
        while (pool := _idle.pop()).helpers != helpers:
            pool.end()
        return pool
    with contextlib.suppress(RuntimeError):
        return ThreadPool(helpers)
    return None


def launch(function: Function, job: Packed, threads: int = 1) -> None:
    """Call `void function(ptr job)` in at most so many threads at once and return when all have ended.

    There may be fewer of them: a function takes its share of the work from a counter in its job. The GIL is free
    meanwhile.
    """
    pool, team = current(), openmp() if threads > 1 else None
    if threads < 2:
        function(addressof(job))
    elif pool is not None or team is None:
        launch_in_pool(function, job, threads)
    else:
        team(function.address, addressof(job), threads, 0)


def launch_in_pool(function: Function, job: Packed, threads: int) -> None:
    with use_pool(threads) as pool:
        if pool is None:
            function(addressof(job))
        else:
            pool.run(function, addressof(job), threads)


@contextlib.contextmanager
def all_of(threads: int) -> Iterator[int]:
    """Say how many threads take part in what is launched inside, at most so many, each of which comes for certain.

    OpenMP's, where it gives as many as are asked for: torch's own work on the logits wakes them, and they spin on the
    cores that a pool would need. A token of a 135M model in Q4 on 2 cores took 11.9 ms by them, 14.6 ms by a pool.
    """
    if current() is None and not _UNSURE & os.environ.keys() and openmp() is not None:
        yield threads
        return
    with use_pool(threads) as pool:
        yield 1 if pool is None else min(threads, pool.helpers + 1)


class Barrier:
    """Memory by which threads that all take part in one job wait for each other (`barrier`)."""

    def __init__(self) -> None:
        self._words = aligned(3 * _WORDS, np.int64)
        self._words[2 * _WORDS] = _system()["yields"]

    @property
    def address(self) -> int:
        return self._words.ctypes.data


@cache
def openmp() -> Callable[[int, int, int, int], None] | None:
    """GNU OpenMP's `parallel` (function, argument, threads, 0), as torch has loaded it; None where it has none.

    Its threads start in 1 µs where torch's own kernels have left them spinning, on the cores that others would need.
    """
    if not sys.platform.startswith("linux"):
        return None
    import torch  # brings it into the process

    copies = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    # A torch that was not built for PyPI has no copy of its own: then what the whole process sees.
    for name in [*map(str, copies), None]:
        with contextlib.suppress(OSError, AttributeError):
            parallel = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).GOMP_parallel
            return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(
                ctypes.cast(parallel, ctypes.c_void_p).value or 0
            )
    return None


@cache
def _system() -> dict[str, int]:
    """Addresses of what lets other threads run, and of what waits for a semaphore and posts to it.

    All are called alike, `yields()`, `waits(semaphore, -1)` and `posts(semaphore, 1, null)`: a function ignores
    arguments that it does not take.
    """
    names = ("sched_yield", "sem_wait", "sem_post")
    if sys.platform == "darwin":  # POSIX's have names there
        names = ("sched_yield", "dispatch_semaphore_wait", "dispatch_semaphore_signal")
    library = ctypes.CDLL(None)
    addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]
    return dict(zip(("yields", "waits", "posts"), addresses, strict=True))


def _new_semaphore(memory: int) -> int:
    """For as long as the process lives; on Linux in this memory."""
    library = ctypes.CDLL(None)
    if sys.platform == "darwin":
        library.dispatch_semaphore_create.restype = ctypes.c_void_p
        return int(library.dispatch_semaphore_create(ctypes.c_long(0)) or 0)
    library.sem_init(ctypes.c_void_p(memory), 0, 0)
    return memory


# ---- machine code ------------------------------------------------------------------------------------------------


@compile_once
def _code() -> dict[str, Function]:
    isa = ISAS[runnable()[-1]]
    names = ("submit", "worker", "nothing")
    return dict(zip(names, compiled(pool_module(isa), isa, *names), strict=True))


def pool_module(isa: Isa) -> str:
    return module(_submit(isa), _worker(isa), FunctionBuilder("nothing", isa))


def _places(control_block: Value) -> dict[str, Value]:
    pointers = ("function", "job", "yields", "waits", "posts", "semaphore")
    return {name: control_block.at(at).of("ptr" if name in pointers else "i64") for name, at in _AT.items()}


def _submit(isa: Isa) -> FunctionBuilder:
    """Open a job, wake sleeping helpers, take part, close the job, and wait for the helpers inside."""
    k = FunctionBuilder("submit", isa, "i64* control_block, ptr function, ptr job, i64 places")
    at, looks = _places(k.args.control_block), k.alloca("i64")
    for name in ("function", "job", "places"):
        at[name].store(k.args[name])
    at["entered"].store(0)
    k.atomic_add(at["turn"], 1, "seq_cst")
    sleepers = k.emit_value("i64", f"atomicrmw xchg ptr {at['asleep']}, i64 0 seq_cst")
    with k.loop(sleepers, may_be_empty=True):
        k.call_void(at["posts"].load(), at["semaphore"].load(), k.constant("i64", 1), k.constant("ptr"))
    k.call_void(k.args.function, k.args.job)
    k.atomic_add(at["turn"], 1, "seq_cst")
    _spin(k, looks, at["yields"].load(), lambda: atomic_load(at["inside"]).eq(0))
    return k


def _worker(isa: Isa) -> FunctionBuilder:
    """Take part in each job once, until all is over.

    `submit` waits for those inside: a helper that finds the turn unchanged once inside may read the job.
    """
    k = FunctionBuilder("worker", isa, "i64* control_block")
    at = _places(k.args.control_block)
    served, looks = k.alloca("i64"), k.alloca("i64")
    served.store(0)
    names = "begin look idle tired rest announce back wait enter come work leave end".split()
    block = {name: k.new_block() for name in names}

    def begin(name: str) -> None:
        k.begin_block(block[name])

    def go(name: str, condition: Value | None = None, otherwise: str = "") -> None:
        k.branch(block[name], condition, block.get(otherwise, ""))

    def is_new(number: Value) -> Value:
        return (number & 1).ne(0) & number.ne(served.load())

    go("begin")
    begin("begin")
    looks.store(0)
    go("look")
    begin("look")
    now = atomic_load(at["turn"])
    go("enter", is_new(now), "idle")
    begin("idle")
    _pause(k)
    looked = looks.load() + 1
    looks.store(looked)
    go("tired", (looked % _LOOKS).eq(0), "look")
    begin("tired")
    over = k.new_block()
    k.branch(block["end"], atomic_load(at["over"]).ne(0), over)
    k.begin_block(over)
    go("announce", looked >= _LOOKS * _PATIENCE, "rest")
    begin("rest")
    k.call_void(at["yields"].load())
    go("look")
    begin("announce")  # before it looks once more: a caller opens a job first, then looks for sleeping helpers
    k.atomic_add(at["asleep"], 1, "seq_cst")
    missed = is_new(atomic_load(at["turn"])) | atomic_load(at["over"]).ne(0)
    go("back", missed, "wait")
    begin("back")  # 0: the semaphore has been posted to for this one too
    asleep, taken = atomic_load(at["asleep"]), k.new_block()
    k.branch(block["wait"], asleep.eq(0), taken)
    k.begin_block(taken)
    pair = k.emit_value("{i64, i1}", f"cmpxchg ptr {at['asleep']}, {asleep.typed}, i64 {asleep - 1} seq_cst seq_cst")
    go("begin", k.emit_value("i1", f"extractvalue {pair.typed}, 1"), "back")
    begin("wait")
    k.call_void(at["waits"].load(), at["semaphore"].load(), k.constant("i64", -1))
    go("begin")
    begin("enter")
    k.atomic_add(at["inside"], 1, "seq_cst")
    go("come", atomic_load(at["turn"]).eq(now), "leave")
    begin("come")
    entered = k.atomic_add(at["entered"], 1, "seq_cst")
    go("work", entered.compare("slt", at["places"].load()), "leave")
    begin("work")
    k.call_void(at["function"].load(), at["job"].load())
    go("leave")
    begin("leave")
    served.store(now)
    k.atomic_add(at["inside"], -1, "seq_cst")
    go("begin")
    begin("end")
    return k


def barrier(isa: Isa) -> FunctionBuilder:
    k = FunctionBuilder("barrier", isa, "i64* memory, i64 threads")
    arrived, phase, yields = (k.args.memory.at(line * _WORDS) for line in range(3))
    looks = k.alloca("i64")
    with k.when(k.args.threads > 1):
        now = atomic_load(phase)
        last = (k.atomic_add(arrived, 1, "seq_cst") + 1).eq(k.args.threads)
        with k.when(last):
            arrived.store(0)
            k.atomic_add(phase, 1, "seq_cst")
        _spin(k, looks, yields.of("ptr").load(), lambda: atomic_load(phase).ne(now))
    return k


def atomic_load(pointer: Value) -> Value:
    """Load an i64 that other threads change, in one order for all threads."""
    return pointer.k.emit_value("i64", f"load atomic i64, ptr {pointer} seq_cst, align 8")


def _pause(k: FunctionBuilder) -> None:
    """Leave the core's units to the thread that shares it, which spinning without would slow by a fifth."""
    if k.isa is NEON or (k.isa is SCALAR and platform.machine() in ARM):
        k.call_void("llvm.aarch64.isb", k.constant("i32", 15))  # `yield` does nothing on most CPUs
    elif platform.machine() in X86:
        k.call_void("llvm.x86.sse2.pause")


def _spin(k: FunctionBuilder, looks: Value, yields: Value, until: Callable[[], Value]) -> None:
    """Wait until a condition holds; now and then let others run. `looks` is memory of the function's own, an i64."""
    look, more, rest, after = (k.new_block() for _ in range(4))
    looks.store(0)
    k.branch(look)
    k.begin_block(look)
    k.branch(after, until(), more)
    k.begin_block(more)
    _pause(k)
    looked = looks.load() + 1
    looks.store(looked)
    k.branch(rest, (looked % _MANY).eq(0), look)
    k.begin_block(rest)
    k.call_void(yields)
    k.branch(look)
    k.begin_block(after)
