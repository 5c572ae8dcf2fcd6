"""Opening of regular files only, by paths that come from others: a store from elsewhere, a folder that changes."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

# O_NONBLOCK: a FIFO may take the place of a file between the two checks, and must not block the open.
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"))


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; follow links.

    A device or a FIFO is refused before the open, since the open alone may block, or do something to a device. The
    opened file is checked again.

    Raises
    ------
    OSError : the file cannot be opened, or is not a regular file.
    """
    _check(os.stat(path))
    handle = os.open(path, _FLAGS)
    try:
        _check(os.fstat(handle))
        return os.fdopen(handle, "rb", buffering=0)
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """Read a regular file, but no more than its first `most` bytes. Raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        parts = []
        while most > 0 and (part := file.read(min(most, max(1 << 20, os.fstat(file.fileno()).st_size + 1)))):
            parts.append(part)
            most -= len(part)
    return b"".join(parts)


def _check(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
