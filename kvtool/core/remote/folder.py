"""`file://`: blobs as files below a folder, such as a network mount."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from urllib.parse import unquote, urlsplit

from filelock import FileLock, Timeout

from kvtool.core.cache.backend import BlobRequest
from kvtool.core.cache.layout import TEMPORARY, atomic_write, make_folder
from kvtool.core.common.urls import for_people
from kvtool.core.errors import NoSpaceError, RemoteError, UsageError
from kvtool.core.remote.blobs import Backend, leases_at, most_bytes
from kvtool.core.remote.catalogue import HEAD

_LOCK = "head.lock"
_LOCK_WAIT = 10.0  # seconds; a replacement takes milliseconds
_LEASES = "push"  # the folder of what is held
_ESCAPED = {"%": "%25", "?": "%3F", "#": "%23"}  # so that what is shown is taken again; others stay as people read them
_PLAIN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def from_url(url: str, timeout: float) -> FolderBlobs:
    if "?" in url or "#" in url:  # left out of a path without a word, it would be another folder
        raise UsageError(f"{for_people(url)} has text after ? or #", "in a folder's name write ? # as %3F %23")
    parts = urlsplit(url)
    path = unquote(parts.path, errors="surrogateescape")  # names of any bytes, as Python has them
    if parts.netloc not in ("", "localhost") or not Path(path).is_absolute() or "\0" in path:
        raise UsageError(f"{for_people(url)} names no folder of this machine", "such as file:///mnt/shared/kv")
    return FolderBlobs(Path(path))


class FolderBlobs(Backend):
    def __init__(self, root: Path) -> None:
        self.url = "file://" + "".join(_ESCAPED.get(sign, sign) for sign in str(root))
        self._root = root
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtool-write")
        self._renewed: float | None = None  # time of the last lease taken here, by the file system's clock

    def sizes(self, names: Sequence[str]) -> list[int]:
        with self._explained("read"):
            return [_size_of(self._root / name) for name in names]

    def put(self, values: Mapping[str, bytes]) -> None:
        """The bytes are durable; their names are with :meth:`flush`, in one sync for all."""
        with self._explained("written"):
            make_folder(self._root)
            for parts, group in _by_folder(values):
                names = list(group)
                for at in range(0, len(names), _AT_ONCE):
                    some = {name.rpartition("/")[2]: values[name] for name in names[at : at + _AT_ONCE]}
                    again_if_gone(partial(self._write, parts, some))

    def flush(self) -> None:
        os.sync()

    def compare_and_swap(self, name: str, before: bytes | None, after: bytes) -> bool:
        with self._explained("written"):
            make_folder(self._root)
            try:
                with FileLock(self._root / _LOCK, timeout=_LOCK_WAIT, mode=0o600):
                    if self.get([name]) != [before]:
                        return False
                    atomic_write(self._root / name, after)
                    return True
            except Timeout as error:
                raise RemoteError(f"{self.url} is locked by another push", "try again") from error

    def names(self, below: str = "") -> Iterator[str]:
        """Lists what killed pushes left, too; of a nested shared store its `head` only."""
        start = self._root / below if below else self._root
        start = start if start.is_dir() else start.parent if below else self._root
        with self._explained("read"):
            for folder, folders, files in os.walk(start, onerror=self._refuse_root):
                at = Path(folder)
                if at != self._root and HEAD in files:
                    folders[:], files = [], [HEAD]
                links = [name for name in folders if (at / name).is_symlink()]
                if at == self._root:
                    folders[:] = [name for name in folders if name != _LEASES]
                for name in ((at / file).relative_to(self._root).as_posix() for file in (*files, *links)):
                    if name.startswith(below) and name != _LOCK and not self._is_unfinished(name):
                        yield name

    def delete(self, names: Sequence[str]) -> None:
        with self._explained("written"):
            for parts, group in _by_folder(names):
                with suppress(FileNotFoundError), opened(self._root, parts) as folder:
                    for name in group:
                        with suppress(FileNotFoundError):
                            os.unlink(name.rpartition("/")[2], dir_fd=folder)
                self._remove_if_empty(parts)

    def hold(self, name: str) -> None:
        """The file's time counts, which the file system sets."""
        with self._explained("written"):
            make_folder(self._root)
            again_if_gone(partial(self._touch, name))

    def _touch(self, name: str) -> None:
        with opened(self._root, (_LEASES,), make=True) as folder:
            handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
            try:
                os.utime(handle)
                self._renewed = os.fstat(handle).st_mtime
            finally:
                os.close(handle)

    def held(self) -> set[str]:
        times: dict[str, float] = {}
        with self._explained("read"), suppress(FileNotFoundError), os.scandir(self._root / _LEASES) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    times[entry.name] = entry.stat(follow_symlinks=False).st_mtime
        now = max(times.values(), default=0.0) if self._renewed is None else self._renewed
        valid, over = leases_at(now, times)
        for name in over:
            self.release(name)
        return valid

    def release(self, name: str) -> None:
        with self._explained("written"), suppress(FileNotFoundError):
            with opened(self._root, (_LEASES,)) as folder:
                os.unlink(name, dir_fd=folder)
            self._remove_if_empty((_LEASES,))

    def close(self) -> None:
        self._pool.shutdown()

    def _read(self, wanted: BlobRequest) -> bytes | None:
        """Read a value or a part of one; empty for what is no plain file. Links are not followed, a FIFO or a device is
        never waited for."""
        with self._explained("read"):
            try:
                handle = os.open(self._root / (wanted.pack or wanted.name), _PLAIN_FILE)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):  # a link, a socket; EMLINK: a link on BSD
                    return b""
                raise
            try:
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode):
                    return b""
                if wanted.pack:
                    return read_at(handle, wanted.start, min(wanted.most, status.st_size))
                most = min(most_bytes(wanted.name), wanted.most)
                value = read_at(handle, 0, status.st_size + 1) if status.st_size <= most else b""  # it may be growing
                return value if len(value) <= most else b""
            finally:
                os.close(handle)

    def _write(self, parts: tuple[str, ...], values: Mapping[str, bytes]) -> None:
        with opened(self._root, parts, make=True) as folder:
            unnamed = {name: temporary_name() for name in values}
            try:
                # An fsync waits for the disk, not for the processor: together they take a third of the time.
                jobs = [self._pool.submit(_write_new, folder, unnamed[name], value) for name, value in values.items()]
                wait(jobs)
                for job in jobs:
                    job.result()
                for name, temporary in unnamed.items():
                    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                for temporary in unnamed.values():
                    with suppress(OSError):
                        os.unlink(temporary, dir_fd=folder)
                raise

    def _remove_if_empty(self, parts: tuple[str, ...]) -> None:
        for depth in range(len(parts), 0, -1):
            with suppress(OSError), opened(self._root, parts[: depth - 1]) as folder:
                os.rmdir(parts[depth - 1], dir_fd=folder)

    def _is_unfinished(self, name: str) -> bool:
        file = name.rpartition("/")[2]
        if not file.startswith(TEMPORARY):
            return False
        with suppress(OSError):
            modified = (self._root / name).lstat().st_mtime
            return not (_LEFT_BEHIND.fullmatch(file) and time.time() - modified > OLD)
        return True

    def _refuse_root(self, error: OSError) -> None:
        """Leave out a folder that may not be read, except the shared store's own."""
        if error.filename == str(self._root) and not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except NoSpaceError:
            raise
        except OSError as error:
            if error.errno in FULL:
                raise NoSpaceError(f"{self.url} is full", "free some space there, or push elsewhere") from error
            hint = "check that the folder is mounted and yours"
            raise RemoteError(f"{self.url} cannot be {what}: {error.strerror or error}", hint) from error


def read_at(handle: int, start: int, size: int) -> bytes:
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


def _by_folder(names: Iterable[str]) -> Iterator[tuple[tuple[str, ...], Iterator[str]]]:
    return groupby(sorted(names), lambda name: tuple(name.split("/")[:-1]))


# ---- writing below a folder that others may write to: no symbolic link is followed, no name can be foreseen --------

OLD = 3600.0  # seconds after which a temporary file is one that a killed push has left
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_LEFT_BEHIND = re.compile(re.escape(TEMPORARY) + r"[0-9]+-[0-9A-Za-z-]+")
_AT_ONCE = 64  # files that wait for the disk together
_THREADS = 8
_TRIES = 3  # between which a folder may be removed, being empty


@contextmanager
def opened(root: Path, parts: Sequence[str], make: bool = False) -> Iterator[int]:
    """Open the folder at `parts` below `root`, entered step by step. Raises OSError, also for a symbolic link."""
    handle = os.open(root, _FOLDER)
    try:
        for part in parts:
            if part in ("", ".", ".."):
                raise OSError(f"{'/'.join(parts)} is no name of a value")
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=handle)
            try:
                inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise OSError(error.errno, f"{part} is a symbolic link, or no folder") from error
                raise
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def temporary_name() -> str:
    return f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"


def again_if_gone(job: Callable[[], None]) -> None:
    """Do something in a folder that another process may just be removing, because it is empty."""
    for _ in range(_TRIES - 1):
        with suppress(FileNotFoundError):
            return job()
    return job()


def _write_new(folder: int, name: str, value: bytes) -> None:
    with open(os.open(name, _NEW_FILE, 0o600, dir_fd=folder), "wb") as file:
        file.write(value)
        file.flush()
        os.fsync(file.fileno())
