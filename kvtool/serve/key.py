"""Where the API key of a server is kept, and how a client's is compared with it."""

from __future__ import annotations

import hmac
from pathlib import Path

from kvtool.core.common.places import data_dir


def key_file(named: Path | None) -> Path:
    """Where the key is kept: the file that is named, else one in the user's data folder."""
    return named if named is not None else data_dir() / "serve.key"


def is_key(given: str, key: str) -> bool:
    """Whether what a client sent is the key, compared in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), key.encode("ascii"))
