"""A row of numbers as one word."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], low: float = 0.0) -> str:
    """Draw a bar for each number, from `low` to the largest; a blank for None."""
    numbers = [value for value in values if value is not None]
    span = max([*numbers, low]) - low or 1.0
    bars = [" " if value is None else _BARS[min(7, max(0, int((value - low) / span * 7.999)))] for value in values]
    return "".join(bars)
