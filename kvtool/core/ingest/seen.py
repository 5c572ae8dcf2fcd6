"""Change detection: a file that is as it was when it was last read costs only a stat.

Its chunks need not be looked up either, as long as no chunk lost anything since. The marks are stored in a side file:
digests of a file's path, its place and times on the disk, and the digest of what was read. A mark does not count for
a file whose content the store does not have; without marks files are read again. For an unreadable file the mark
names the reader that tried, and the reason is kept with it until the file is read or gone.
"""

from __future__ import annotations

import hashlib
import os
import time
from base64 import b64decode, b64encode
from contextlib import suppress
from dataclasses import replace

from kvtool.core import __version__
from kvtool.core.cache.store import Store
from kvtool.core.corpus.readers.document import UnreadableFile
from kvtool.core.corpus.walk import Failure

_NAME, _FORMAT = "seen/files.json", 1
_MARK_BYTES = 16
_RACY_SECONDS = 2.0  # a file may change once more within what its file system takes for one moment
_SPARE = 10_000  # marks of files that are gone, or were read in another way
_SPARE_FAILURES = 1_000


_Failures = dict[str, dict[str, str]]  # which files could not be read and why, by their marks in hex


class Seen:
    """The marks of a store's files.

    Parameters
    ----------
    retry : files that could not be read are read again.
    """

    def __init__(self, retry: bool = False) -> None:
        self._retry = retry
        self._known: tuple[set[bytes], _Failures] | None = None  # read when they are first asked for
        self._whole = False  # whether all that is known is of files of which every chunk is still stored
        self._now: set[bytes] = set()  # of files that this run has met
        self._noted: dict[str, bytes] = {}  # of files that it has read, by their paths
        self._failed: _Failures = {}  # likewise
        self._fine: set[str] = set()  # paths of files that could be read

    def is_unchanged(self, store: Store, path: str, digest: str) -> bool:
        """Return True if a file was last read exactly as it is now, and had this content."""
        with suppress(OSError):
            mark = _mark(path, os.stat(path), digest)
            if mark in self._of(store)[0]:
                self._now.add(mark)
                self._fine.add(path)
                return True
        return False

    def vouches(self, store: Store, path: str, digest: str) -> bool:
        """Return True if a file is unchanged, and all of it was stored and cannot have been lost since."""
        self._of(store)
        return self._whole and self.is_unchanged(store, path, digest)

    def failure(self, store: Store, path: str, means: str) -> UnreadableFile | None:
        """Why a file could not be read that lies there just as it did; None: nothing is known of it, or it is to be
        read again.

        Parameters
        ----------
        means : what would read it now (`Reading.means`).
        """
        if self._retry:
            return None
        with suppress(OSError, KeyError, TypeError, AttributeError):  # a row may be of another kvtool
            mark = _mark(path, os.stat(path), means).hex()
            row = self._of(store)[1][mark]
            error = UnreadableFile.from_row(row)
            self._failed[mark] = row | {"path": path}
            return error
        return None

    def compared(self, store: Store | None, failure: Failure, means: str = "") -> Failure:
        """Compare a file that was tried, and failed, with earlier runs: a failure is known where the file lies there as
        it did, and failed in the same words. It is remembered for the next run.

        Parameters
        ----------
        means : what tried to read it, if its bytes are at fault.
        """
        with suppress(OSError):
            mark = _mark(failure.path, os.stat(failure.path), repr((__version__, means, failure.error))).hex()
            self._failed[mark] = {"path": failure.path, "message": failure.error}
            return replace(failure, known=not self._retry and store is not None and mark in self._of(store)[1])
        return failure

    def note(self, path: str, before: os.stat_result, digest: str) -> None:
        """Remember what a file held that was read now.

        Parameters
        ----------
        before : what was known of it before it was read.
        """
        self._fine.add(path)
        if _rests(before):
            self._noted[path] = _mark(path, before, digest)

    def take_back(self, path: str) -> None:
        """Forget a file that was read and, after all, not stored."""
        self._noted.pop(path, None)
        self._fine.discard(path)

    def note_failure(self, path: str, before: os.stat_result, means: str, error: UnreadableFile) -> None:
        """Remember that a file cannot be read, and why; see `note`, `failure`."""
        self._fine.discard(path)
        if _rests(before):
            self._failed[_mark(path, before, means).hex()] = error.to_row() | {"path": path}

    def keep(self, store: Store, whole: bool) -> None:
        """Keep the marks for the next run; those of other files, too, as long as they are not many more.

        Parameters
        ----------
        whole : this run has met all the files that it was to meet.
        """
        known, known_failures = self._of(store)
        now = self._now | {*self._noted.values()}
        failures = {mark: row for mark, row in known_failures.items() if self._may_fail(row)} | self._failed
        if self._whole and now <= known and failures == known_failures:
            return
        marks = known | now
        if whole and (not self._whole or len(marks) > 2 * len(now) + _SPARE):
            marks = now
        if whole and len(failures) > 2 * len(self._failed) + _SPARE_FAILURES:
            failures = self._failed
        packed = b64encode(b"".join(sorted(marks))).decode("ascii")
        at = store.dropped_revision() if whole else None
        store.write_side(_NAME, {"format": _FORMAT, "marks": packed, "failures": failures, "whole": at})

    def _may_fail(self, row: object) -> bool:
        path = row.get("path") if isinstance(row, dict) else None
        return isinstance(path, str) and path not in self._fine and os.path.lexists(path)

    def _of(self, store: Store) -> tuple[set[bytes], _Failures]:
        if self._known is None:
            marks, failures, at = _read(store)
            self._known = marks, failures
            self._whole = at == store.dropped_revision()
        return self._known


def _rests(status: os.stat_result) -> bool:
    return time.time() - max(status.st_mtime, status.st_ctime) > _RACY_SECONDS


def _mark(path: str, status: os.stat_result, held: str) -> bytes:
    place = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return hashlib.blake2b(repr((path, place, held)).encode("utf-8", "surrogatepass"), digest_size=_MARK_BYTES).digest()


def _read(store: Store) -> tuple[set[bytes], _Failures, int | None]:
    kept = store.read_side(_NAME, format=_FORMAT)
    failures = kept.get("failures", {})
    try:
        data = b64decode(kept.get("marks", ""), validate=True)
    except (ValueError, TypeError):
        data = b""
    marks = {data[at : at + _MARK_BYTES] for at in range(0, len(data), _MARK_BYTES)}
    return marks, failures if isinstance(failures, dict) else {}, kept.get("whole")
