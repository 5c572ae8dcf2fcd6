"""Values that several commands read in the same way."""

from __future__ import annotations

import re
from pathlib import Path

from kvtool.core.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def store_path(store: str) -> Path:
    """The store's folder; the user's own when none is named.

    Raises
    ------
    UsageError : a URL; remote stores are not built yet.
    """
    from kvtool.core.settings import data_dir

    if "://" in store:
        raise UsageError(f"remote stores are not supported: {store}", "give a local folder")
    return Path(store) if store else data_dir() / "store"


def size_in_bytes(text: str) -> int:
    """`20GB`, `500MiB`, `1000` → bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not found or found[2] not in _UNITS:
        raise UsageError(f"{text!r} is not a size", "such as 500MB or 20GB")
    return int(float(found[1]) * _UNITS[found[2]])


def system_text(path: str | None) -> str | None:
    """The instruction in a file given by `--system`.

    Raises
    ------
    UsageError : it cannot be read, or is empty.
    """
    if path is None:
        return None
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the instruction {path!r} cannot be read: {error}", "--system takes a UTF-8 text file") from error
    if not text:
        raise UsageError(f"the instruction {path!r} is empty", "write what the model should do, or leave --system out")
    return text
