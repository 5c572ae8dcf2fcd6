"""Lengths of time as people write them."""

from __future__ import annotations

import re

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0, "y": 365 * 86400.0}


def seconds(text: str) -> float:
    """Read a length of time: `10m`, `1.5h`, `30s`, or a number of seconds.

    Raises
    ------
    ValueError : it is neither.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w|y)\s*", text, re.IGNORECASE | re.ASCII)
    return float(match[1]) * _UNITS[match[2].lower()] if match else float(text.strip())
