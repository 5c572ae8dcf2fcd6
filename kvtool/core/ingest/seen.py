"""Which files are still as they were when they were last read: an unchanged file costs a stat.

Kept beside the store, as marks alone: of a file's path, its place and times on the disk, and the digest of what was
read there. A mark says nothing of a file whose content the store does not have; without marks files are read again.
"""

from __future__ import annotations

import hashlib
import os
import time
from base64 import b64decode, b64encode
from contextlib import suppress

from kvtool.core.cache.side import read_side, write_side
from kvtool.core.cache.store import Store

_NAME, _FORMAT = "seen/files.json", 1
_MARK_BYTES = 16
_RACY_SECONDS = 2.0  # a file may change once more within what its file system takes for one moment
_SPARE = 10_000  # marks of files that are gone, or were read in another way


class Seen:
    """The marks of a store's files."""

    def __init__(self) -> None:
        self._known: set[bytes] | None = None  # read when they are first asked for
        self._now: set[bytes] = set()  # of files that this run has met

    def is_unchanged(self, store: Store, path: str, digest: str) -> bool:
        """Whether a file was last read just as it lies there now, and held this content."""
        if self._known is None:
            self._known = _read(store)
        with suppress(OSError):
            mark = _mark(path, os.stat(path), digest)
            if mark in self._known:
                self._now.add(mark)
                return True
        return False

    def note(self, path: str, before: os.stat_result, digest: str) -> None:
        """Remember what a file held that was read now.

        Parameters
        ----------
        before : what was known of it before it was read.
        """
        if time.time() - max(before.st_mtime, before.st_ctime) > _RACY_SECONDS:
            self._now.add(_mark(path, before, digest))

    def keep(self, store: Store, files: int) -> None:
        """Keep the marks for the next run; those of other files, too, as long as they are not many more than the
        store's files."""
        known = _read(store) if self._known is None else self._known
        if not self._now <= known:
            marks = known | self._now
            if len(marks) > 2 * files + _SPARE:
                marks = self._now
            write_side(store, _NAME, {"format": _FORMAT, "marks": b64encode(b"".join(sorted(marks))).decode("ascii")})


def _mark(path: str, status: os.stat_result, digest: str) -> bytes:
    place = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return hashlib.blake2b(
        repr((path, place, digest)).encode("utf-8", "surrogatepass"), digest_size=_MARK_BYTES
    ).digest()


def _read(store: Store) -> set[bytes]:
    marks = read_side(store, _NAME, format=_FORMAT).get("marks", "")
    try:
        data = b64decode(marks, validate=True)
    except (ValueError, TypeError):
        return set()
    return {data[at : at + _MARK_BYTES] for at in range(0, len(data), _MARK_BYTES)}
