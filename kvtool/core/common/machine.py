"""What this machine is doing, and what it has no room for."""

from __future__ import annotations

import os

_NO_MEMORY = ("out of memory", "outofmemory", "not enough memory", "can't allocate memory")
_BUSY = 0.5  # processes a core, as the load average of the last minute has them


def is_busy() -> bool:
    """Whether other work wants the cores, so that times measured now are not the machine's own.

    False where nobody can tell.
    """
    try:
        return os.getloadavg()[0] > _BUSY * (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, in Python's words or in torch's, which need not be imported."""
    said = f"{type(error).__name__} {error}".lower()
    return isinstance(error, MemoryError) or any(words in said for words in _NO_MEMORY)
