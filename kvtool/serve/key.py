"""API key of a server: its file, and its comparison with a client's."""

from __future__ import annotations

import hmac
from pathlib import Path

from kvtool.core.common.files import data_dir


def key_file(named: Path | None) -> Path:
    """Return the path of the key: the named file, else one in the user's data folder."""
    return named if named is not None else data_dir() / "serve.key"


def is_key(given: str, key: str) -> bool:
    """Return True if what a client sent is the key, compared in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), key.encode("ascii"))
