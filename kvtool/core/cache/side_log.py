"""Journals beside the records: one JSON object a line, each with a digest of its own, and only the newest of them.

Who appends holds the journal's lock, so lines of several processes do not mix. A line that was torn, or does not match
its digest, is passed over and counted; the others stand.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.layout import atomic_write
from kvtool.core.cache.side import json_digest
from kvtool.core.cache.space import check_file
from kvtool.core.common.sizes import counted
from kvtool.core.errors import NoSpaceError

if TYPE_CHECKING:
    from kvtool.core.cache.reader import StoreReader

LOG_BYTES = 2**21  # what a journal may grow to; its older half goes then
FOLDERS = ("audit",)  # of a store, in which journals stand
_LOCK_SECONDS = 5.0  # an append takes milliseconds: who waits longer is behind something that is stuck
_DIGEST = "digest"


@dataclass(frozen=True, slots=True)
class SideLog:
    """A journal's lines as they can be read: the values, the oldest first, and how many lines were not sound."""

    values: tuple[dict[str, Any], ...] = ()
    damaged: int = 0


def append_side(store: StoreReader, name: str, value: dict[str, Any], most: int = LOG_BYTES) -> bool:
    """Append a JSON object to the journal ``folder/name``.

    Parameters
    ----------
    most : bytes that the journal may have; before it has more, its older half is dropped.

    Returns
    -------
    False: it cannot be kept, on a read-only store, without room, or while another process holds the journal.
    """
    if store.read_only:
        return False
    line = _line(value)
    try:
        path = store.side_file(name)
        with _locked(path):
            check_file(path.parent, len(line))
            _make_room(path, len(line), most)
            _append(path, line)
    except (OSError, NoSpaceError):  # a lock's timeout is an OSError, too
        return False
    return True


def read_side_log(store: StoreReader, name: str) -> SideLog:
    """Read what :func:`append_side` has kept; nothing where there is no journal, or it cannot be read."""
    try:
        return _parsed(_lines(store.side_file(name)))
    except OSError:
        return SideLog()


# ---- all of a store's --------------------------------------------------------------------------------------------


def damaged_journals(root: Path) -> Iterator[tuple[str, str]]:
    """Journals below a store's folder that hold lines which are not sound: place and what is wrong."""
    for path in _journals(root):
        with contextlib.suppress(FileNotFoundError):
            if (why := _wrong_with(path)) is not None:
                yield path.relative_to(root).as_posix(), why


def mend_journals(root: Path) -> None:
    """Drop the lines that are not sound, and what is no file; the other lines cannot be made again, and stay."""
    for path in _journals(root):
        with contextlib.suppress(OSError, NoSpaceError), _locked(path):  # who looks again is told
            if not stat.S_ISREG(path.lstat().st_mode):
                path.unlink()
            elif len(kept := _sound(lines := _lines(path))) < len(lines):
                atomic_write(path, _joined(kept))


def _journals(root: Path) -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (root / folder).glob("*.jsonl"))


def _wrong_with(path: Path) -> str | None:
    try:
        damaged = _parsed(_lines(path)).damaged
        if damaged:
            with contextlib.suppress(OSError), _locked(path):  # a line may have been half written
                damaged = _parsed(_lines(path)).damaged
    except FileNotFoundError:
        raise
    except OSError as error:
        return f"cannot be read: {error}"
    return f"has {counted(damaged, 'line')} that cannot be read" if damaged else None


# ---- lines -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a journal's lock. Raises OSError: another process holds it for too long."""
    import filelock

    with filelock.FileLock(f"{path}.lock", timeout=_LOCK_SECONDS, mode=0o600):
        yield


def _line(value: dict[str, Any]) -> bytes:
    """The object with its digest as one line of ASCII, which no reader can break in another place."""
    return json.dumps({_DIGEST: json_digest(value), **value}, separators=(",", ":")).encode() + b"\n"


def _append(path: Path, line: bytes) -> None:
    """Write a line behind the last one; what a kill has torn gets an end first. All of it is written, or nothing."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0), 0o600)
    with open(handle, "r+b", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is not a regular file")
        size = file.seek(0, os.SEEK_END)
        whole = not size or os.pread(handle, 1, size - 1) == b"\n"
        data = line if whole else b"\n" + line
        if file.write(data) != len(data):
            file.truncate(size)
            raise OSError(f"{path} could not be written")


def _make_room(path: Path, coming: int, most: int) -> None:
    """Drop the older half of a journal that the next line would make too long, and what is not sound in it."""
    try:
        if path.lstat().st_size + coming <= most:
            return
        lines = _sound(_lines(path))
    except FileNotFoundError:
        return
    kept, size = 0, 0
    for line in reversed(lines):
        size += len(line) + 1
        if size > most // 2:
            break
        kept += 1
    atomic_write(path, _joined(lines[len(lines) - kept :]))


def _sound(lines: list[bytes]) -> list[bytes]:
    return [line for line in lines if _value(line) is not None]


def _joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _lines(path: Path) -> list[bytes]:
    """The newest lines: of a file that is longer than a journal may be, those behind the first whole one."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):  # reading a FIFO would hang
        raise OSError(f"{path} is not a regular file")
    with path.open("rb") as file:
        file.seek(max(0, status.st_size - LOG_BYTES))
        lines = file.read(LOG_BYTES).splitlines()
    return lines if status.st_size <= LOG_BYTES else lines[1:]


def _parsed(lines: list[bytes]) -> SideLog:
    values = [_value(line) for line in lines]
    sound = tuple(value for value in values if value is not None)
    return SideLog(sound, len(values) - len(sound))


def _value(line: bytes) -> dict[str, Any] | None:
    """A line's object; None where it is not that of its digest."""
    try:
        value = json.loads(line)
        return value if value.pop(_DIGEST) == json_digest(value) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
