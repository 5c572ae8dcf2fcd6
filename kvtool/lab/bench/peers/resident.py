"""How much memory this process has, by the kernel's own book: nothing is sampled, so timing goes on undisturbed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5), clear_refs


def resident() -> int | None:
    """Bytes of memory that this process has now, files mapped into memory included."""
    return _book("VmRSS")


def peak_resident() -> int | None:
    """The most that it had since `reset_peak`."""
    return _book("VmHWM")


def mapped() -> int | None:
    """What of it are mapped files now."""
    return _book("RssFile")


def reset_peak() -> None:
    """Begin a new peak; where the kernel knows none, the peak of the whole process stands."""
    with suppress(OSError):
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")


def _book(name: str) -> int | None:
    with suppress(OSError, ValueError):
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) * 1024
    return None
