"""Which chunks were used when: appended by readers without any lock, folded into the store by a writer."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

from kvtool.core.cache import layout

_MAX_LOG_BYTES = 64 * 2**20  # then readers stop noting until a writer folds it
_LONG_LOG_BYTES = 2**20
_MAX_BUFFER = 4096
_LINE = re.compile(rb"([0-9a-f]{40}) ([0-9]{1,12}) ([0-9a-f]{8})")


class AccessLog:
    """Buffers a reader's notes; a flush is one ``O_APPEND`` write, so lines of several processes do not mix."""

    def __init__(self, root: Path, enabled: bool) -> None:
        self._path = root / layout.ACCESS_FILE
        self._enabled = enabled
        self._seen: dict[bytes, int] = {}
        self._mutex = threading.Lock()

    @property
    def is_long(self) -> bool:
        """Whether a writer should fold the log now: readers stop noting in one that is full."""
        try:
            return self._path.stat().st_size > _LONG_LOG_BYTES
        except OSError:
            return False

    def note(self, chunk_ids: Iterable[bytes]) -> None:
        """Remember that these chunks were used now."""
        if not self._enabled:
            return
        now = int(time.time())
        with self._mutex:
            self._seen.update((bytes(chunk_id), now) for chunk_id in chunk_ids)
            full = len(self._seen) >= _MAX_BUFFER
        if full:
            self.flush()

    def flush(self) -> None:
        """Append what is buffered. Never an error: losing a note costs nothing but order of eviction."""
        with self._mutex:
            seen, self._seen = self._seen, {}
        if not seen:
            return
        data = b"".join(_line(chunk_id, when) for chunk_id, when in seen.items())
        with contextlib.suppress(OSError):
            append(self._path, data)


def append(path: Path, data: bytes) -> None:
    """One write at the end of a log, unless that is long enough; raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600)
    try:
        os.fchmod(handle, 0o600)
        if os.fstat(handle).st_size + len(data) <= _MAX_LOG_BYTES:
            os.write(handle, data)
    finally:
        os.close(handle)


def _line(chunk_id: bytes, when: int) -> bytes:
    body = f"{chunk_id.hex()} {when}".encode()
    return body + f" {zlib.crc32(body):08x}\n".encode()


def read_log(root: Path) -> dict[bytes, int]:
    """What no writer has folded yet: chunk id → last use (seconds).

    Notes move from the log to the log set aside, and from there into the store: who reads in this order misses none.
    """
    found = [_read(root / layout.ACCESS_FILE), _read(_aside(root))]
    return {chunk_id: max(one.get(chunk_id, 0) for one in found) for chunk_id in found[0] | found[1]}


def take_log(root: Path) -> tuple[dict[bytes, int], Path]:
    """Set the log aside and read it: chunk id → last use (seconds). Unlink the path once that is committed.

    A log set aside by a writer that died is read again, together with the newer one only after it is gone.
    """
    aside = _aside(root)
    if not aside.exists():
        with contextlib.suppress(FileNotFoundError):
            (root / layout.ACCESS_FILE).rename(aside)
    return _read(aside), aside


def _aside(root: Path) -> Path:
    return root / f"{layout.ACCESS_FILE}.folding"


def _read(path: Path) -> dict[bytes, int]:
    """The sound lines of a log; the newest of each chunk."""
    try:
        regular = stat.S_ISREG(path.lstat().st_mode)  # reading a FIFO would hang
        lines = path.read_bytes().splitlines() if regular else []
    except OSError:
        return {}
    last: dict[bytes, int] = {}
    for line in lines:
        found = _LINE.fullmatch(line)
        if found and zlib.crc32(line[:-9]) == int(found[3], 16):
            chunk_id = bytes.fromhex(found[1].decode())
            last[chunk_id] = max(last.get(chunk_id, 0), int(found[2]))
    return last
