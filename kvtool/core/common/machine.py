"""Machine state: its cores, its load, and errors for lack of memory."""

from __future__ import annotations

import functools
import os
import platform
from contextlib import suppress
from pathlib import Path

from kvtool.core.common.arithmetic import sysctl

_NO_MEMORY = ("out of memory", "outofmemory", "not enough memory", "can't allocate memory")
_BUSY = 0.5  # processes a core, as the load average of the last minute has them


@functools.cache
def cpu_name() -> str:
    """The CPU's name as its maker gives it; the architecture's where nobody tells."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        for key in ("model name", "Model", "Hardware"):  # the last two on ARM
            named = next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
            if named:
                return " ".join(named.split())
    return sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_busy() -> bool:
    """Return True if other work uses the cores, so that times measured now are not the machine's own.

    False if the load is unknown.
    """
    try:
        return os.getloadavg()[0] > _BUSY * (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return False


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of Python or torch that says that memory ran out. Torch need not be imported."""
    said = f"{type(error).__name__} {error}".lower()
    return isinstance(error, MemoryError) or any(words in said for words in _NO_MEMORY)
