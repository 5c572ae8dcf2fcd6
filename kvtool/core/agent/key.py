"""The key that clients of the server for agents send: made once, readable by its owner alone."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from kvtool.core.common.files import data_dir, make_folder
from kvtool.core.errors import KvtoolError

_MOST = 4096  # bytes of a key


def key_file(named: Path | None) -> Path:
    """Return the path of the key: the named file, else one in the user's data folder."""
    return named if named is not None else data_dir() / "mcp.key"


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
            raise KvtoolError(f"others may read the key in {path}", "remove the file, and a new one is made")
        with path.open("rb") as file:
            key = file.read(_MOST).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no ASCII text"
        raise KvtoolError(f"the key in {path} cannot be read: {why}", "name another with --key-file") from error
    if not key:
        raise KvtoolError(f"{path} holds no key", "remove the file, and a new one is made")
    return key


def _make(path: Path) -> None:
    """Write a new key, if there is no file yet; no other process ever sees half of one."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "w", encoding="ascii") as file:
            file.write(f"kv-{secrets.token_urlsafe(32)}\n")
        with suppress(FileExistsError):  # another server was quicker
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
