"""Machine code kept on disk: LLVM takes a tenth of a second for what is read back in a millisecond.

What is read here is run. It is taken only from a folder of the user's own that nobody else can write to, and only if
its digest, which covers what it was made of, is right; anything else is as if nothing were there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from kvtool.core.common.places import cache_dir
from kvtool.core.common.private import make_folder
from kvtool.core.errors import KvtoolError

_MOST_BYTES = 2**22  # of one piece of code
_MOST_FILES = 256
_DIGEST = 32
_FOR_READING = os.O_RDONLY  # no link is followed, and nobody waits for the other end of a pipe
for _flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):
    _FOR_READING |= getattr(os, _flag, 0)


def key_of(*parts: str) -> str:
    """The name of code that is made of these texts: compiler, instruction set, source."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()


def kept_code(key: str) -> bytes | None:
    """The code of that name, if it is kept and whole."""
    folder = _folder(make=False)
    if folder is None:
        return None
    try:
        descriptor = os.open(folder / key, _FOR_READING)
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            found = file.read(_MOST_BYTES + 1) if stat.S_ISREG(about.st_mode) and _is_ours(about) else b""
    except OSError:
        return None
    code = found[_DIGEST:]
    return code if len(found) <= _MOST_BYTES and code and found[:_DIGEST] == _digest(key, code) else None


def keep_code(key: str, code: bytes) -> None:
    """Keep code under a name; where that is not possible it is made anew next time."""
    folder = _folder(make=True)
    if folder is None or len(code) + _DIGEST > _MOST_BYTES:
        return
    with contextlib.suppress(OSError):
        _make_room(folder)
        descriptor, part = tempfile.mkstemp(dir=folder)  # for the user's eyes only
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_digest(key, code) + code)
            os.replace(part, folder / key)
        except BaseException:
            os.unlink(part)
            raise


def _folder(make: bool) -> Path | None:
    """Where code is kept; None where there is no such folder that is the user's alone."""
    try:
        folder = cache_dir() / "native"
        if make:
            make_folder(folder)
        found = os.lstat(folder)
    except (OSError, KvtoolError):
        return None
    return folder if stat.S_ISDIR(found.st_mode) and _is_ours(found) else None


def _is_ours(found: os.stat_result) -> bool:
    """Whether it belongs to this user, and no other can write to it. Windows keeps its folders by other means."""
    if not hasattr(os, "geteuid"):
        return True
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + code).digest()


def _make_room(folder: Path) -> None:
    """Let go of the oldest: code of versions that are no longer there."""
    files = [Path(entry.path) for entry in os.scandir(folder) if not entry.is_dir(follow_symlinks=False)]
    if len(files) >= _MOST_FILES:
        for path in sorted(files, key=lambda one: one.stat().st_mtime)[: _MOST_FILES // 2]:
            path.unlink(missing_ok=True)
