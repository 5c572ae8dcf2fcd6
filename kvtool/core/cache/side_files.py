"""Side files next to the records: tables of the retrieval index, small JSON, and journals. Each carries a digest.

A table ends in 24 bytes: ``kvtool`` with two bytes of format, and xxh3-128 over all before the digest. It is checked
when a process maps it for the first time: after that it is mapped memory like the rest. A JSON object has its digest in
a field. A journal holds one JSON object a line, each with a digest of its
own, and only the newest of them. A process that appends holds the journal's lock, so lines of several processes do not
mix. A line that was torn, or does not match its digest, is skipped and counted; the others are read.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from kvtool.core.cache.layout import atomic_write
from kvtool.core.cache.space import check_file
from kvtool.core.common.sizes import counted
from kvtool.core.errors import DamagedError, NoSpaceError

TABLES = ".tables"  # how the names of sealed tables end
TAIL_BYTES = 24
_MAGIC = b"kvtool\0\1"
_DIGEST = "digest"
_AT_ONCE = 2**24
_FOLDERS = ("index", "gate", "speeds", "seen")
LOG_BYTES = 2**21  # maximum length of a journal; then its older half is dropped
_JOURNAL_FOLDERS = ("audit",)
_LOCK_SECONDS = 5.0  # an append takes milliseconds: a process that waits longer waits for one that is stuck

_sound: set[tuple[int, ...]] = set()  # files that this process has checked, as they are


# ---- tables ------------------------------------------------------------------------------------------------------


def tail_of(data: bytes) -> bytes:
    """Return the bytes that follow a table's: magic number and digest."""
    return _MAGIC + xxhash.xxh3_128_digest(data + _MAGIC)


def check_table(path: Path, view: memoryview, status: os.stat_result) -> memoryview:
    """Return the bytes of a mapped table without its tail; hashed at the first time in this process.

    Raises
    ------
    DamagedError : they are not those of the digest.
    """
    body = view[:-TAIL_BYTES]
    known = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if known not in _sound:
        digest = xxhash.xxh3_128()
        covered = view[: len(body) + len(_MAGIC)]
        for at in range(0, len(covered), _AT_ONCE):
            digest.update(covered[at : at + _AT_ONCE])
        if len(view) < TAIL_BYTES or view[len(covered) :] != digest.digest() or covered[len(body) :] != _MAGIC:
            raise DamagedError(f"{path} does not match its digest", "run `kvtool store verify --repair`")
        _sound.add(known)
    return body


# ---- JSON --------------------------------------------------------------------------------------------------------


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object with its digest. Raises OSError, NoSpaceError."""
    atomic_write(path, json.dumps({_DIGEST: json_digest(value), **value}, indent=1).encode())


def read_json(path: Path, **marks: Any) -> dict[str, Any]:
    """Read what :func:`write_json` wrote; empty where nothing was written, or that cannot be read.

    Parameters
    ----------
    marks : fields that the object must have with these values, such as `format`; else it counts as unreadable.
    """
    try:
        value = _read_json(path)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if all(value.get(field) == mark for field, mark in marks.items()) else {}


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, and check its digest.

    Raises
    ------
    OSError : it cannot be read.
    ValueError : it is no JSON object, or not that of its digest.
    """
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no object")
    if value.pop(_DIGEST, None) != json_digest(value):
        raise ValueError(f"{path} does not match its digest")
    return value


def json_digest(value: dict[str, Any]) -> str:
    """Return the digest of a JSON object, whatever the order of its fields; xxh3-128 in hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


# ---- all of a store's --------------------------------------------------------------------------------------------


def damaged_files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the files below a store's folder that do not match their digest: place and what is wrong."""
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # replaced while we look
                if (why := _file_damage(path)) is not None:
                    yield path.relative_to(root).as_posix(), why


def _file_damage(path: Path) -> str | None:
    try:
        if path.name.endswith(TABLES):
            data = memoryview(path.read_bytes())
            if len(data) < TAIL_BYTES or data[-TAIL_BYTES:] != tail_of(bytes(data[:-TAIL_BYTES])):
                return "does not match its digest"
        elif path.suffix == ".json":
            _read_json(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        return f"cannot be read: {error}"
    return None


# ---- journals ----------------------------------------------------------------------------------------------------


class SideFolder(Protocol):
    """Protocol of a store: where its side files are."""

    @property
    def read_only(self) -> bool: ...

    def side_file(self, name: str) -> Path:
        """Return the path of a side file, and make its folder."""
        ...


@dataclass(frozen=True, slots=True)
class SideLog:
    """A journal's lines as they can be read: the values, the oldest first, and how many lines were not sound."""

    values: tuple[dict[str, Any], ...] = ()
    damaged: int = 0


def append_side(store: SideFolder, name: str, value: dict[str, Any], most: int = LOG_BYTES) -> bool:
    """Append a JSON object to the journal ``folder/name``.

    Parameters
    ----------
    most : bytes that the journal may have; before it has more, its older half is dropped.

    Returns
    -------
    False: it cannot be kept: the store is read-only, the disk full, or another process holds the journal.
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


def read_side_log(store: SideFolder, name: str) -> SideLog:
    """Read what :func:`append_side` has kept; nothing where there is no journal, or it cannot be read."""
    try:
        return _parsed(_lines(store.side_file(name)))
    except OSError:
        return SideLog()


# ---- all of a store's --------------------------------------------------------------------------------------------


def damaged_journals(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the journals below a store's folder that hold unsound lines: place and what is wrong."""
    for path in _journals(root):
        with contextlib.suppress(FileNotFoundError):
            if (why := _journal_damage(path)) is not None:
                yield path.relative_to(root).as_posix(), why


def mend_journals(root: Path) -> None:
    """Drop unsound lines, and journals that are no files; the other lines cannot be made again, and stay."""
    for path in _journals(root):
        with contextlib.suppress(OSError, NoSpaceError), _locked(path):  # a later check reports it
            if not stat.S_ISREG(path.lstat().st_mode):
                path.unlink()
            elif len(kept := _sound_lines(lines := _lines(path))) < len(lines):
                atomic_write(path, _joined(kept))


def _journals(root: Path) -> list[Path]:
    return sorted(path for folder in _JOURNAL_FOLDERS for path in (root / folder).glob("*.jsonl"))


def _journal_damage(path: Path) -> str | None:
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
    """Return the object with its digest as one line of ASCII, which no reader can break in another place."""
    return json.dumps({_DIGEST: json_digest(value), **value}, separators=(",", ":")).encode() + b"\n"


def _append(path: Path, line: bytes) -> None:
    """Write a line after the last one; a line that a kill has torn is ended first. All of it is written, or nothing."""
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
        lines = _sound_lines(_lines(path))
    except FileNotFoundError:
        return
    kept, size = 0, 0
    for line in reversed(lines):
        size += len(line) + 1
        if size > most // 2:
            break
        kept += 1
    atomic_write(path, _joined(lines[len(lines) - kept :]))


def _sound_lines(lines: list[bytes]) -> list[bytes]:
    return [line for line in lines if _value(line) is not None]


def _joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _lines(path: Path) -> list[bytes]:
    """Return the newest lines: of a file that is longer than a journal may be, those after the first whole one."""
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
    """Return a line's object; None where it does not match its digest."""
    try:
        value = json.loads(line)
        return value if value.pop(_DIGEST) == json_digest(value) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
