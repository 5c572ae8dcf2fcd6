"""Files written below a folder that others may write to: no symbolic link is followed, no name can be foreseen."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtool.core.cache.layout import TEMPORARY

OLD = 3600.0  # seconds after which a temporary file is one that a killed push has left
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_LEFT_BEHIND = re.compile(re.escape(TEMPORARY) + r"[0-9]+-[0-9A-Za-z-]+")
_AT_ONCE = 64  # files that wait for the disk together
_THREADS = 8
_TRIES = 3  # between which a folder may be removed, being empty


@contextmanager
def opened(root: Path, parts: Sequence[str], make: bool = False) -> Iterator[int]:
    """A handle of the folder at `parts` below `root`, entered step by step.

    Raises
    ------
    OSError : it is not there, or one of the steps is a symbolic link.
    """
    handle = os.open(root, _FOLDER)
    try:
        for part in parts:
            if part in ("", ".", ".."):
                raise OSError(f"{'/'.join(parts)} is no name of a value")
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=handle)
            inner = _enter(handle, part)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def _enter(folder: int, part: str) -> int:
    try:
        return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise OSError(error.errno, f"{part} is a symbolic link, or no folder") from error
        raise


class Writing:
    """Writes files below a root, each durable before it has its name; the names are made durable by who calls."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtool-write")
        self._tidied: set[tuple[str, ...]] = set()

    def write(self, parts: tuple[str, ...], values: Mapping[str, bytes]) -> None:
        """Write files into the folder at `parts`. Raises OSError; what has its name by then is whole."""
        names = list(values)
        for at in range(0, len(names), _AT_ONCE):
            some = {name: values[name] for name in names[at : at + _AT_ONCE]}
            again_if_gone(lambda some=some: self._write_some(parts, some))  # type: ignore[misc]

    def close(self) -> None:
        """Let go of the threads."""
        self._pool.shutdown()

    def _write_some(self, parts: tuple[str, ...], values: Mapping[str, bytes]) -> None:
        with opened(self._root, parts, make=True) as folder:
            beside = {name: new_name() for name in values}
            try:
                # An fsync waits for the disk, not for the processor: together they take a third of the time.
                jobs = [self._pool.submit(_write_new, folder, beside[name], value) for name, value in values.items()]
                wait(jobs)
                for job in jobs:
                    job.result()
                for name, temporary in beside.items():
                    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                for temporary in beside.values():
                    with suppress(OSError):
                        os.unlink(temporary, dir_fd=folder)
                raise
            if parts not in self._tidied:
                self._tidied.add(parts)
                _tidy(folder)


def new_name() -> str:
    """A name for a temporary file: nobody can put something in its place beforehand."""
    return f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"


def is_left_behind(name: str, modified: float, now: float) -> bool:
    """Return True if a file is the temporary one of a push that was killed long ago."""
    return name.startswith(TEMPORARY) and bool(_LEFT_BEHIND.fullmatch(name)) and now - modified > OLD


def again_if_gone(job: Callable[[], None]) -> None:
    """Do something in a folder that another process may just be removing, because it is empty."""
    for attempt in range(_TRIES):
        try:
            return job()
        except FileNotFoundError:
            if attempt == _TRIES - 1:
                raise


def _write_new(folder: int, name: str, value: bytes) -> None:
    with open(os.open(name, _NEW_FILE, 0o600, dir_fd=folder), "wb") as file:
        file.write(value)
        file.flush()
        os.fsync(file.fileno())


def _tidy(folder: int) -> None:
    """Remove what killed pushes left in a folder that has just been written to: so its time is now."""
    now = os.fstat(folder).st_mtime
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(TEMPORARY)]
    for name in names:
        with suppress(OSError):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and is_left_behind(name, status.st_mtime, now):
                os.unlink(name, dir_fd=folder)
