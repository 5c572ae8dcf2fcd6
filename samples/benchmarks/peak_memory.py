"""The memory that a computation takes on top of what is held already."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")
_EVERY_S = 0.005


class Peak:
    """`bytes` : the peak above the level at the start; None if it is unknown."""

    def __init__(self) -> None:
        self.bytes: int | None = None


@contextlib.contextmanager
def peak_memory(device: str) -> Iterator[Peak]:
    """Watch the memory of what runs inside.

    CUDA: what torch has allocated there. CPU: the process's own pages (files mapped into memory aside), sampled; it
    takes a share of the processor, so nothing is timed inside. Elsewhere, and without /proc: unknown.
    """
    peak = Peak()
    gc.collect()
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
    elif device == "cpu" and own_pages() is not None:
        _give_back()
        with _sampled(peak):
            yield peak
    else:
        yield peak


def own_pages() -> int | None:
    """Return the bytes of memory that this process does not share; None if the system does not report them."""
    try:
        _, resident, shared = map(int, _STATM.read_text(encoding="ascii").split()[:3])
    except (OSError, ValueError):
        return None
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def _sampled(peak: Peak) -> Iterator[None]:
    before = own_pages() or 0
    highest, done = before, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(_EVERY_S):
            highest = max(highest, own_pages() or 0)

    watcher = threading.Thread(target=watch, name="kvtool-memory", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        highest = max(highest, own_pages() or 0)
        done.set()
        watcher.join()
    peak.bytes = highest - before


def _give_back() -> None:
    """Let the allocator return what is free, else the next computation finds it there and seems to take nothing."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
