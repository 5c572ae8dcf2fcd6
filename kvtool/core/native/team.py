"""One piece of machine code in several threads at once: torch's own, which else would stand in the way of others."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvtool.core.native.crew import current


@dataclass(frozen=True, slots=True)
class OpenMP:
    """GNU OpenMP as torch has loaded it: its threads wait where torch's own kernels left them, and start in 1 µs.

    They wait spinning for a while after each product of torch's, on the cores that other threads would need.

    Attributes
    ----------
    parallel : (function, argument, threads, 0): runs `function(argument)` on each of a team; without Python's lock.
    barrier, number, threads : addresses of what the function calls there.
    """

    parallel: Callable[[int, int, int, int], None]
    barrier: int
    number: int
    threads: int


@cache
def openmp() -> OpenMP | None:
    """Find the library; None where torch computes with other threads (macOS, Windows)."""
    if not sys.platform.startswith("linux"):
        return None
    import torch  # brings it into the process

    copies = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    # A torch that was not built for PyPI has no copy of its own: then what the whole process sees.
    for name in [*map(str, copies), None]:
        try:
            return _functions(ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
        except (OSError, AttributeError):
            continue
    return None


def _functions(library: Any) -> OpenMP:
    library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    library.GOMP_parallel.restype = None
    addresses = [
        ctypes.cast(function, ctypes.c_void_p).value or 0
        for function in (library.GOMP_barrier, library.omp_get_thread_num, library.omp_get_num_threads)
    ]
    return OpenMP(library.GOMP_parallel, *addresses)


def run_in_team(function: int, job: int, threads: int) -> None:
    """Call `void function(ptr job)` in at most so many threads at once and return when all have ended.

    There may be fewer of them: a function takes its share of the work from a counter in its job. The GIL is free
    meanwhile.

    Parameters
    ----------
    function, job : addresses.
    """
    crew = current() if threads > 1 else None
    team = openmp() if threads > 1 else None
    if crew is not None:
        crew.run(function, job, threads)
    elif team is not None:
        team.parallel(function, job, threads, 0)
    else:
        _by_threads(function, job, threads)


def _by_threads(function: int, job: int, threads: int) -> None:
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    others = [threading.Thread(target=run, args=(job,), daemon=True) for _ in range(threads - 1)]
    for other in others:
        other.start()
    run(job)
    for other in others:
        other.join()
