"""One piece of machine code in several threads at once: torch's own, which else would stand in the way of others."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache

Run = Callable[[int], None]


def run_in_team(function: int, job: int, threads: int) -> None:
    """Call `void function(ptr job)` in at most so many threads at once and return when all have ended.

    There may be fewer of them: a function takes its share of the work from a counter in its job. The GIL is free
    meanwhile.

    Parameters
    ----------
    function, job : addresses.
    """
    if threads > 1:
        team = _openmp()
        if team is not None:
            team(function, job, threads, 0)
            return
    _by_threads(function, job, threads)


@cache
def _openmp() -> Callable[[int, int, int, int], None] | None:
    """GNU OpenMP's `GOMP_parallel`, where torch has brought it.

    Its threads wait spinning for a while after each product of torch's, on the cores that other threads would need.
    """
    import torch  # noqa: F401  brings it into the process

    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (OSError, AttributeError, TypeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    found: Callable[[int, int, int, int], None] = parallel
    return found


def _by_threads(function: int, job: int, threads: int) -> None:
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    others = [threading.Thread(target=run, args=(job,), daemon=True) for _ in range(threads - 1)]
    for other in others:
        other.start()
    run(job)
    for other in others:
        other.join()
