"""Names of codec levels, known without importing torch."""

from __future__ import annotations

from kvtool.core.errors import UsageError

LEVELS = ("raw", "lossless")


def check_level(level: str) -> str:
    """The level, if there is a codec for it.

    Raises
    ------
    UsageError : there is none.
    """
    if level not in LEVELS:
        raise UsageError(f"there is no level {level!r}", f"known: {', '.join(LEVELS)}")
    return level
