"""What else this machine is doing."""

from __future__ import annotations

import os

_BUSY = 0.5  # processes a core, as the load average of the last minute has them


def is_busy() -> bool:
    """Whether other work wants the cores, so that times measured now are not the machine's own.

    False where nobody can tell.
    """
    try:
        return os.getloadavg()[0] > _BUSY * (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return False
