"""Running compiled code on the threads that torch computes with."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class OpenMP:
    """GNU OpenMP as torch has loaded it: its threads wait where torch's own kernels left them, and start in 1 µs.

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
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            return _functions(ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
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
