"""`file://`: blobs as files below a folder, such as a network mount."""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from kvtool.core.cache.layout import TEMPORARY, atomic_write, make_folder
from kvtool.core.errors import NoSpaceError, RemoteError
from kvtool.core.remote.limits import MOST_BYTES, most_bytes

_LOCK = "head.lock"
_LOCK_WAIT = 10.0  # seconds; a swap takes milliseconds


class FolderBlobs:
    """A folder; made on the first put."""

    def __init__(self, root: Path) -> None:
        self.url = f"file://{root}"
        self._root = root

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """See Blobs."""
        return [self._read(name) for name in names]

    def has(self, names: Sequence[str]) -> list[bool]:
        """See Blobs."""
        return [self._path(name).is_file() for name in names]

    def put(self, values: Mapping[str, bytes]) -> None:
        """See Blobs. Not durable before :meth:`settle`: one sync for all files instead of one for each."""
        with self._explained("written"):
            for name, value in values.items():
                path = self._path(name)
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
                try:
                    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                    with open(handle, "wb") as file:
                        file.write(value)
                    temporary.replace(path)
                finally:
                    temporary.unlink(missing_ok=True)

    def settle(self) -> None:
        """See Blobs."""
        os.sync()

    def swap(self, name: str, before: bytes | None, after: bytes) -> bool:
        """See Blobs. Writers are kept apart by a lock file."""
        with self._explained("written"):
            make_folder(self._root)
            try:
                with FileLock(self._root / _LOCK, timeout=_LOCK_WAIT):
                    if self._read(name) != before:
                        return False
                    atomic_write(self._path(name), after)
                    return True
            except Timeout as error:
                raise RemoteError(f"{self.url} is locked by another push", "try again") from error

    def names(self, below: str = "") -> Iterator[str]:
        """See Blobs."""
        top = self._path(below) if below else self._root
        start = top if top.is_dir() else top.parent
        for folder, _, files in os.walk(start):
            for file in files:
                name = (Path(folder) / file).relative_to(self._root).as_posix()
                if name.startswith(below) and not file.startswith(TEMPORARY) and file != _LOCK:
                    yield name

    def delete(self, names: Sequence[str]) -> None:
        """See Blobs; folders that are left empty go, too."""
        with self._explained("written"):
            for name in names:
                path = self._path(name)
                path.unlink(missing_ok=True)
                with suppress(OSError):
                    path.parent.rmdir()

    def reader(self) -> FolderReader:
        """See Blobs."""
        return FolderReader(self)

    def close(self) -> None:
        """Nothing is held."""

    def _path(self, name: str) -> Path:
        return self._root / name

    def _read(self, name: str, most: int | None = None) -> bytes | None:
        with self._explained("read"):
            return read_bounded(self._path(name), min(most_bytes(name), MOST_BYTES if most is None else most))

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except NoSpaceError:
            raise
        except OSError as error:
            hint = "check that the folder is mounted and yours"
            raise RemoteError(f"{self.url} cannot be {what}: {error.strerror or error}", hint) from error


def read_bounded(path: Path, most: int) -> bytes | None:
    """A file's bytes; None: there is none. What is no plain file, or larger than `most`, is as good as an empty one.

    Links are not followed, a FIFO or a device is never waited for.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):  # a link, a socket; EMLINK: a link on BSD
            return b""
        raise
    state = os.fstat(handle)
    if not stat.S_ISREG(state.st_mode) or state.st_size > most:
        os.close(handle)
        return b""
    with open(handle, "rb") as file:
        value = file.read(state.st_size + 1)  # it may be growing
    return value if len(value) <= most else b""


class FolderReader:
    """Files in the order asked for. A file system cannot be told to hurry: a read takes what it takes."""

    def __init__(self, blobs: FolderBlobs) -> None:
        self._blobs, self._asked = blobs, deque[tuple[str, int]]()

    def ask(self, names: Sequence[str], most: Sequence[int]) -> None:
        """See Reader."""
        self._asked.extend(zip(names, most, strict=True))

    def take(self) -> bytes | None:
        """See Reader."""
        return self._blobs._read(*self._asked.popleft())

    def close(self) -> None:
        """See Reader."""
        self._asked.clear()
