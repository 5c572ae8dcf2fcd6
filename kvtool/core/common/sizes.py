from __future__ import annotations

import re

from kvtool.core.errors import UsageError

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TIMES = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0, "y": 365 * 86400.0}


def size_in_bytes(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not match or match[2] not in _SIZES:
        raise UsageError(f"{text!r} is not a size", "such as 500MB or 20GB")
    return int(float(match[1]) * _SIZES[match[2]])


def shown_size(amount: int) -> str:
    """Format bytes for people, in a unit that suits them: `0.8 kB`, `5.2 MB`, `20.0 GB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if amount >= 0.95 * scale:
            return f"{amount / scale:,.1f} {unit}"
    return f"{amount / 1e3:,.1f} kB"


def counted(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def seconds(text: str) -> float:
    """Read a length of time: `10m`, `1.5h`, `30s`, or a number of seconds. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w|y)\s*", text, re.IGNORECASE | re.ASCII)
    return float(match[1]) * _TIMES[match[2].lower()] if match else float(text.strip())
