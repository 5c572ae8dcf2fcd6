"""Names of codec levels, known without importing torch."""

from __future__ import annotations

from kvtool.core.errors import UsageError

LOSSY = ("1", "2", "3", "4")  # finest first; each has steps three times as wide as the one before
EXACT = ("raw", "lossless")
LEVELS = (*EXACT, *LOSSY)
DEFAULT_LOSSY = "2"
NO_PROFILE = bytes(16)  # what a record names that was made without one
MAKER = slice(64, 80)  # of a lossy record's payload: the digest of its profile (payload.py)
MAX_LOSS = 0.01  # nats a token of the answer: what `auto` may lose


def check_level(level: str) -> str:
    """The level, if there is a codec for it.

    Raises
    ------
    UsageError : there is none.
    """
    if level not in LEVELS:
        raise UsageError(f"there is no level {level!r}", f"known: {', '.join(LEVELS)}")
    return level


def coarser(level: str) -> str | None:
    """The lossy level next to this one with wider steps, which it may refine; None for the coarsest."""
    at = LOSSY.index(level) + 1
    return LOSSY[at] if at < len(LOSSY) else None
