"""Threads that help with one job after the other and are never waited for unless they have begun.

OpenMP's team ends when every thread of it has come by, also one that the system has not let run: where a loader, or
another program, has that core, each of a pass's 200 jobs waits for the scheduler. Here who calls does all of a job that
nobody else takes.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from kvtool.core.native.compiling import compiled, runnable
from kvtool.core.native.isa import ISAS

# The board, 8 bytes a field: what the one that calls writes on one line of the cache, what helpers write on another.
# `turn` is odd while a job is open; so many `places` there are for helpers; `over` ends them.
_FIELDS = ("turn", "function", "job", "places", "over", "yields", "sleeps", "", "inside", "entered")
_AT = {name: place for place, name in enumerate(_FIELDS)}
_LINE = 64
_LOOKS = 32  # at the board before another thread is let run
_PATIENCE = 500  # such rounds without a job, about 0.2 ms, before a helper sleeps between its looks
_NAP = 30  # µs


@dataclass(frozen=True, slots=True)
class _Code:
    lead: Callable[[int, int, int, int], None]
    serve: Callable[[int], None]


class Crew:
    """Helpers of the thread that made them.

    Parameters
    ----------
    helpers : so many threads beside the one that calls, at least 1.

    Raises
    ------
    RuntimeError : they cannot be started.
    """

    def __init__(self, code: _Code, helpers: int) -> None:
        self._code = code
        self._block = (ctypes.c_int64 * (len(_FIELDS) + _LINE // 8))()
        address = ctypes.addressof(self._block)
        self._board = -(-address // _LINE) * _LINE
        self._fields = (ctypes.c_int64 * len(_FIELDS)).from_address(self._board)
        for name in ("yields", "sleeps"):
            self._fields[_AT[name]] = _libc()[name]
        try:
            for _ in range(helpers):  # a `threading.Thread` would be waited for until it has begun
                _thread.start_new_thread(self._serve, ())
        except BaseException:  # no thread left for this user, or Ctrl-C: those that have begun look for jobs
            self.end()
            raise

    def _serve(self) -> None:
        """A helper's life, which holds the board: nobody waits for its end."""
        self._code.serve(self._board)

    def run(self, function: int, job: int, threads: int) -> None:
        """Call `void function(ptr job)` here and, if they come in time, in up to `threads` - 1 of the helpers."""
        self._code.lead(self._board, function, job, threads - 1)

    def end(self) -> None:
        """Let the helpers go, without waiting for them either."""
        self._fields[_AT["over"]] = 1


_current = threading.local()


def current() -> Crew | None:
    """The crew of the calling thread, if it has one just now."""
    crew: Crew | None = getattr(_current, "crew", None)
    return crew


@contextlib.contextmanager
def gathered(threads: int) -> Iterator[None]:
    """Have a crew for the calling thread's jobs inside; where it has one already, or there is none, all stays so."""
    crew = None if threads < 2 or current() is not None else _new_crew(threads - 1)
    if crew is None:
        yield
        return
    _current.crew = crew
    try:
        yield
    finally:
        _current.crew = None
        crew.end()


def _new_crew(helpers: int) -> Crew | None:
    """A crew; None where there is no code for one, or no thread to be had: it is help, and nobody needs it."""
    if not _libc() or not runnable():
        return None
    with contextlib.suppress(RuntimeError):
        return Crew(_code(), helpers)
    return None


@cache
def _libc() -> dict[str, int]:
    """Addresses of what lets others run and what sleeps; none where there is no POSIX library."""
    if sys.platform == "win32":
        return {}
    library = ctypes.CDLL(None)
    names = {"yields": library.sched_yield, "sleeps": library.usleep}
    return {name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in names.items()}


_compiling = threading.Lock()


def _code() -> _Code:
    with _compiling:
        return _compiled()


@cache
def _compiled() -> _Code:
    lead, serve = compiled(_module(), ISAS[runnable()[-1]], "lead", "serve")
    whole, pointer = ctypes.c_int64, ctypes.c_void_p
    return _Code(ctypes.CFUNCTYPE(None, pointer, pointer, pointer, whole)(lead), ctypes.CFUNCTYPE(None, pointer)(serve))


def _module() -> str:
    places = "\n".join(f"  %{name} = getelementptr i64, ptr %board, i64 {at}" for name, at in _AT.items() if name)
    return f"{_LEAD.format(places=places)}\n{_SERVE.format(places=places, looks=_LOOKS, patience=_PATIENCE, nap=_NAP)}"


# Opens a job, takes part in it, closes it, and waits for those inside.
_LEAD = """
define void @lead(ptr %board, ptr %its_function, ptr %its_job, i64 %its_places) {{
entry:
{places}
  store ptr %its_function, ptr %function
  store ptr %its_job, ptr %job
  store i64 %its_places, ptr %places
  store i64 0, ptr %entered
  %opened = atomicrmw add ptr %turn, i64 1 seq_cst
  call void %its_function(ptr %its_job)
  %closed = atomicrmw add ptr %turn, i64 1 seq_cst
  br label %wait
wait:
  %there = load atomic i64, ptr %inside seq_cst, align 8
  %any = icmp ne i64 %there, 0
  br i1 %any, label %wait, label %done
done:
  ret void
}}
"""
# Takes part in each job once, until all is over. Who is inside is waited for: a helper that finds the turn unchanged
# when it is inside may read what the job is.
_SERVE = """
define void @serve(ptr %board) {{
entry:
{places}
  br label %begin
begin:
  %served = phi i64 [0, %entry], [%now, %leave]
  br label %round
round:
  %rounds = phi i64 [0, %begin], [%more_rounds, %yield], [%more_rounds, %sleep]
  br label %look
look:
  %looks = phi i64 [0, %round], [%more_looks, %nothing]
  %now = load atomic i64, ptr %turn seq_cst, align 8
  %odd = and i64 %now, 1
  %open = icmp eq i64 %odd, 1
  %other = icmp ne i64 %now, %served
  %fresh = and i1 %open, %other
  br i1 %fresh, label %enter, label %nothing
nothing:
  %more_looks = add i64 %looks, 1
  %again = icmp ult i64 %more_looks, {looks}
  br i1 %again, label %look, label %pause
pause:
  %more_rounds = add i64 %rounds, 1
  %ended = load atomic i64, ptr %over seq_cst, align 8
  %on = icmp eq i64 %ended, 0
  br i1 %on, label %stay, label %end
stay:
  %tired = icmp ugt i64 %more_rounds, {patience}
  br i1 %tired, label %sleep, label %yield
yield:
  %yielding = load ptr, ptr %yields
  %yielded = call i32 %yielding()
  br label %round
sleep:
  %sleeping = load ptr, ptr %sleeps
  %slept = call i32 %sleeping(i32 {nap})
  br label %round
enter:
  %came = atomicrmw add ptr %inside, i64 1 seq_cst
  %then = load atomic i64, ptr %turn seq_cst, align 8
  %stands = icmp eq i64 %then, %now
  br i1 %stands, label %count, label %leave
count:
  %before = atomicrmw add ptr %entered, i64 1 seq_cst
  %most = load i64, ptr %places
  %wanted = icmp slt i64 %before, %most
  br i1 %wanted, label %work, label %leave
work:
  %its_function = load ptr, ptr %function
  %its_job = load ptr, ptr %job
  call void %its_function(ptr %its_job)
  br label %leave
leave:
  %left = atomicrmw sub ptr %inside, i64 1 seq_cst
  br label %begin
end:
  ret void
}}
"""
