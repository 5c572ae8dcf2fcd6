"""Files and folders that are their owner's alone, under any umask."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from pathlib import Path
from typing import BinaryIO


def make_folder(path: Path) -> None:
    """Make a 0700 folder, and so each missing folder above it, and make the names durable; nothing if it is there."""
    missing = [*itertools.takewhile(lambda folder: not folder.is_dir(), (path, *path.parents))]
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            folder.chmod(0o700)
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(handle)
    except OSError as error:  # some file systems cannot sync a folder, and then have nothing to lose
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EROFS):
            raise
    finally:
        os.close(handle)


def new_file(path: Path) -> BinaryIO:
    """Open a new 0600 file for writing. Raises OSError: something is stored there, or it cannot be made."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.fchmod(handle, 0o600)
    return open(handle, "wb")
