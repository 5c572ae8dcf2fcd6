"""Files and folders: default ones, private ones under any umask, and regular files by untrusted paths."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Literal

from kvtool.core.errors import UsageError

TEMPORARY = ".tmp-"  # begins the names of files that are not complete
# O_NONBLOCK: a FIFO may take the place of a file between the two checks, and must not block the open.
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"))


def data_dir() -> Path:
    """Return the folder of the default store (`$KVTOOL_HOME/data`, else the platform's user data folder)."""
    return _state_folder("data")


def cache_dir() -> Path:
    """Return the cache folder (`$KVTOOL_CACHE`, `$KVTOOL_HOME/cache`, else the platform's)."""
    override = os.environ.get("KVTOOL_CACHE")
    return Path(override).expanduser() if override else _state_folder("cache")


def default_config_file(environ: Mapping[str, str]) -> Path:
    home = environ.get("KVTOOL_HOME")
    if home:
        return Path(home).expanduser() / "config.toml"
    import platformdirs

    return platformdirs.user_config_path("kvtool", appauthor=False) / "config.toml"


def _state_folder(kind: Literal["data", "cache"]) -> Path:
    home = os.environ.get("KVTOOL_HOME")
    if home:
        return Path(home).expanduser() / kind
    import platformdirs

    find = platformdirs.user_data_path if kind == "data" else platformdirs.user_cache_path
    folder = find("kvtool", appauthor=False)
    if not folder.is_absolute():  # an unexpanded "~": neither HOME nor an entry in the user database
        raise UsageError(f"no {kind} folder: this user has no home folder", "set KVTOOL_HOME to a writable folder")
    return folder


# ---- private files -----------------------------------------------------------------------------------------------


def make_folder(path: Path) -> None:
    """Make a 0700 folder, and so each missing folder above it, and make the names durable; nothing if it is there."""
    missing = [*itertools.takewhile(lambda folder: not folder.is_dir(), (path, *path.parents))]
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            folder.chmod(0o700)
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(handle)
    except OSError as error:  # some file systems cannot sync a folder, and then have nothing to lose
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EROFS):
            raise
    finally:
        os.close(handle)


def new_file(path: Path) -> BinaryIO:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.fchmod(handle, 0o600)
    return open(handle, "wb")


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file durably: a reader sees the old bytes or the new ones, never a part."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with new_file(temporary) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


# ---- regular files, by paths that come from others: a store from elsewhere, a folder that changes ------------------


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file; follow links. Raises OSError for a device or FIFO before the open, which may block."""
    _check(os.stat(path))
    handle = os.open(path, _FLAGS)
    try:
        _check(os.fstat(handle))
        return os.fdopen(handle, "rb", buffering=0)
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    with open_regular(path) as file:
        parts = []
        while most > 0 and (part := file.read(min(most, max(1 << 20, os.fstat(file.fileno()).st_size + 1)))):
            parts.append(part)
            most -= len(part)
    return b"".join(parts)


def _check(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
