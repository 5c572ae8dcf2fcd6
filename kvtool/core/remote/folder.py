"""`file://`: blobs as files below a folder, such as a network mount."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout

from kvtool.core.cache.backend import Wanted
from kvtool.core.cache.layout import TEMPORARY, atomic_write, make_folder
from kvtool.core.common.urls import for_people
from kvtool.core.errors import NoSpaceError, RemoteError, UsageError
from kvtool.core.remote.blobs import ReadInTurn, seconds_held, stands
from kvtool.core.remote.descend import Writing, again_if_gone, is_left_behind, opened
from kvtool.core.remote.head import HEAD
from kvtool.core.remote.limits import MOST_BYTES, most_bytes

_LOCK = "head.lock"
_LOCK_WAIT = 10.0  # seconds; a swap takes milliseconds
_LEASES = "push"  # the folder of what is held
_ESCAPED = {"%": "%25", "?": "%3F", "#": "%23"}  # so that what is shown is taken again; others stay as people read them
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def from_url(url: str, timeout: float) -> FolderBlobs:
    """The folder of a `file://` URL; a timeout has no meaning for it."""
    if "?" in url or "#" in url:  # left out of a path without a word, it would be another folder
        raise UsageError(f"{for_people(url)} has something behind ? or #", "in a folder's name write ? # as %3F %23")
    parts = urlsplit(url)
    path = unquote(parts.path, errors="surrogateescape")  # names of any bytes, as Python has them
    if parts.netloc not in ("", "localhost") or not Path(path).is_absolute() or "\0" in path:
        raise UsageError(f"{for_people(url)} names no folder of this machine", "such as file:///mnt/shared/kv")
    return FolderBlobs(Path(path))


class FolderBlobs:
    """A folder; made on the first put."""

    def __init__(self, root: Path) -> None:
        self.url = "file://" + "".join(_ESCAPED.get(sign, sign) for sign in str(root))
        self._root = root
        self._writing: Writing | None = None
        self._renewed: float | None = None  # when something was last held from here, as the file system tells it

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """See Blobs."""
        return [self._read(name) for name in names]

    def sizes(self, names: Sequence[str]) -> list[int]:
        """See Blobs."""
        with self._explained("read"):
            return [_size_of(self._path(name)) for name in names]

    def put(self, values: Mapping[str, bytes]) -> None:
        """See Blobs. The bytes are durable; their names are with :meth:`settle`, in one sync for all."""
        with self._explained("written"):
            make_folder(self._root)
            self._writing = self._writing or Writing(self._root)
            for parts, names in groupby(sorted(values), lambda name: tuple(name.split("/")[:-1])):
                self._writing.write(parts, {name.rpartition("/")[2]: values[name] for name in names})

    def settle(self) -> None:
        """See Blobs. Covers what a push before this one has put, too."""
        os.sync()

    def swap(self, name: str, before: bytes | None, after: bytes) -> bool:
        """See Blobs. Writers are kept apart by a lock file."""
        with self._explained("written"):
            make_folder(self._root)
            try:
                with FileLock(self._root / _LOCK, timeout=_LOCK_WAIT, mode=0o600):
                    if self._read(name) != before:
                        return False
                    atomic_write(self._path(name), after)
                    return True
            except Timeout as error:
                raise RemoteError(f"{self.url} is locked by another push", "try again") from error

    def names(self, below: str = "") -> Iterator[str]:
        """See Blobs. What killed pushes have left is listed, too; of a tier further below its `head` only."""
        start = self._path(below) if below else self._root
        start = start if start.is_dir() else start.parent if below else self._root
        with self._explained("read"):
            for folder, folders, files in os.walk(start, onerror=self._refuse_root):
                at = Path(folder)
                if at != self._root and HEAD in files:
                    folders[:], files = [], [HEAD]
                links = [name for name in folders if (at / name).is_symlink()]
                if at == self._root:
                    folders[:] = [name for name in folders if name != _LEASES]
                for name in (_name_of(self._root, at / file) for file in (*files, *links)):
                    if name.startswith(below) and name != _LOCK and not self._is_unfinished(name):
                        yield name

    def delete(self, names: Sequence[str]) -> None:
        """See Blobs; folders that are left empty go, too."""
        with self._explained("written"):
            for parts, group in groupby(sorted(names), lambda name: tuple(name.split("/")[:-1])):
                with suppress(FileNotFoundError), opened(self._root, parts) as folder:
                    for name in group:
                        with suppress(FileNotFoundError):
                            os.unlink(name.rpartition("/")[2], dir_fd=folder)
                self._remove_if_empty(parts)

    def reader(self) -> ReadInTurn:
        """See Blobs. A file system cannot be told to hurry: a read takes what it takes."""
        return ReadInTurn(self._wanted)

    def hold(self, name: str) -> None:
        """See Blobs. The file's time counts, which the file system sets."""
        with self._explained("written"):
            make_folder(self._root)
            again_if_gone(lambda: self._touch(name))

    def _touch(self, name: str) -> None:
        with opened(self._root, (_LEASES,), make=True) as folder:
            handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
            try:
                os.utime(handle)
                self._renewed = os.fstat(handle).st_mtime
            finally:
                os.close(handle)

    def held(self) -> set[str]:
        """See Blobs."""
        times: dict[str, float] = {}
        with self._explained("read"), suppress(FileNotFoundError), os.scandir(self._root / _LEASES) as entries:
            for entry in entries:
                with suppress(FileNotFoundError, KeyError):
                    seconds_held(entry.name)  # one of ours
                    times[entry.name] = entry.stat(follow_symlinks=False).st_mtime
        now = max(times.values(), default=0.0) if self._renewed is None else self._renewed
        over = {name for name, at in times.items() if not stands(name, at, now)}
        for name in over:
            self.release(name)
        return times.keys() - over

    def release(self, name: str) -> None:
        """See Blobs."""
        with self._explained("written"), suppress(FileNotFoundError):
            with opened(self._root, (_LEASES,)) as folder:
                os.unlink(name, dir_fd=folder)
            self._remove_if_empty((_LEASES,))

    def close(self) -> None:
        """See Blobs."""
        if self._writing is not None:
            self._writing.close()

    def _path(self, name: str) -> Path:
        return self._root / name

    def _read(self, name: str, most: int = MOST_BYTES) -> bytes | None:
        with self._explained("read"):
            return read_bounded(self._path(name), min(most_bytes(name), most))

    def _wanted(self, wanted: Wanted) -> bytes | None:
        if not wanted.pack:
            return self._read(wanted.name, wanted.most)
        with self._explained("read"):
            return read_part(self._path(wanted.pack), wanted.start, wanted.most)

    def _remove_if_empty(self, parts: tuple[str, ...]) -> None:
        for depth in range(len(parts), 0, -1):
            with suppress(OSError), opened(self._root, parts[: depth - 1]) as folder:
                os.rmdir(parts[depth - 1], dir_fd=folder)

    def _is_unfinished(self, name: str) -> bool:
        file = name.rpartition("/")[2]
        if not file.startswith(TEMPORARY):
            return False
        with suppress(OSError):
            return not is_left_behind(file, self._path(name).lstat().st_mtime, time.time())
        return True

    def _refuse_root(self, error: OSError) -> None:
        """A folder that may not be read is left out, but not the tier's own."""
        if error.filename == str(self._root) and not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except NoSpaceError:
            raise
        except OSError as error:
            if error.errno in _FULL:
                raise NoSpaceError(f"{self.url} is full", "free some space there, or push elsewhere") from error
            hint = "check that the folder is mounted and yours"
            raise RemoteError(f"{self.url} cannot be {what}: {error.strerror or error}", hint) from error


def read_bounded(path: Path, most: int) -> bytes | None:
    """A file's bytes; None: there is none. What is no plain file, or larger than `most`, is as good as an empty one.

    Links are not followed, a FIFO or a device is never waited for.
    """
    with _plain_file(path) as found:
        if not isinstance(found, int):
            return found
        size = os.fstat(found).st_size
        value = _read_at(found, 0, size + 1) if size <= most else b""  # it may be growing
    return value if len(value) <= most else b""


def read_part(path: Path, start: int, size: int) -> bytes | None:
    """Bytes of a file from `start` on, as many as there are of `size`; else as :func:`read_bounded`."""
    with _plain_file(path) as found:
        return _read_at(found, start, min(size, os.fstat(found).st_size)) if isinstance(found, int) else found


@contextmanager
def _plain_file(path: Path) -> Iterator[int | bytes | None]:
    """A handle of a file; None: there is none; empty: it is no plain file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EMLINK):  # a link, a socket; EMLINK: a link on BSD
            raise
        yield b""
        return
    try:
        yield handle if stat.S_ISREG(os.fstat(handle).st_mode) else b""
    finally:
        os.close(handle)


def _read_at(handle: int, start: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0 and (part := os.pread(handle, size, start)):
        parts.append(part)
        start, size = start + len(part), size - len(part)
    return b"".join(parts)


def _size_of(path: Path) -> int:
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _name_of(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()
