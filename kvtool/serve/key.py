"""The API key: made once, kept where only its owner can read it, compared in constant time."""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from kvtool.core.cache.layout import make_folder
from kvtool.core.common.places import data_dir
from kvtool.core.errors import KvtoolError

_NAME = "serve.key"
_BYTES = 32
_MOST = 4096  # characters of a key


def key_file(named: Path | None) -> Path:
    """Where the key is kept: the file that is named, else one in the user's data folder."""
    return named if named is not None else data_dir() / _NAME


def read_key(path: Path) -> str:
    """The key in a file, which is made with a new one where it is missing.

    Raises
    ------
    KvtoolError : it cannot be read or made, others may read it, or it holds no key.
    """
    try:
        make_folder(path.parent)
        _make(path)
        if path.stat().st_mode & 0o077:
            raise KvtoolError(f"others may read the API key in {path}", f"chmod 600 {path}, and make a new one")
        key = path.read_text(encoding="ascii")[:_MOST].strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no ASCII text"
        raise KvtoolError(f"the API key in {path} cannot be read: {why}", "name another with --key-file") from error
    if not key:
        raise KvtoolError(f"{path} holds no API key", "remove the file, and a new one is made")
    return key


def _make(path: Path) -> None:
    """Write a new key, if there is no file yet: no other process ever sees half of one."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "w", encoding="ascii") as file:
            file.write(f"kv-{secrets.token_urlsafe(_BYTES)}\n")
        try:
            os.link(temporary, path)
        except FileExistsError:  # another server was quicker
            return
    finally:
        temporary.unlink(missing_ok=True)


def is_key(given: str, key: str) -> bool:
    """Whether what a client sent is the key."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), key.encode("ascii"))
