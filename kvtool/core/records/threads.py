"""Threads that make records: the codec's work is machine code, in which Python serves others."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch


def working() -> ThreadPoolExecutor:
    """As many threads as torch would take for one product; a product of theirs takes one."""
    return ThreadPoolExecutor(torch.get_num_threads(), "kvtool-records", _alone)


def _alone() -> None:
    """Let this thread's products be its own.

    By OpenMP itself: `torch.set_num_threads` would hold for all threads that begin later, too.
    """
    torch.get_num_threads()  # a thread takes its number from torch once, when it first asks
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).omp_set_num_threads(1)
