"""Watcher of files: ingests with --sync whenever one of them has changed."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvtool.core.common.text import as_on_disk
from kvtool.core.common.types import Events
from kvtool.core.errors import KvtoolError, NoSpaceError, StoreLockedError, UsageError
from kvtool.core.ingest.job import KeptModel, ingest, is_new
from kvtool.core.ingest.options import WatchOptions
from kvtool.core.ingest.report import IngestReport
from kvtool.core.ingest.stream import walk
from kvtool.core.ingest.survey import holds_anything

_LOOK_S = 1.0  # between two looks at the named paths: a replaced file, a folder that is back
_AGAIN_S = 30.0  # before a locked or full store is tried again
_Stamp = tuple[int, int, int]  # of a file: bytes, time of its change, time of any change of it
_State = tuple[str, int, int]  # "folder", its device and inode; "file", its bytes and the time of its change


class Watcher:
    """Watcher that keeps a store up to date. The model stays loaded; the store and its lock are free between rounds.

    Each round compares the whole selection with the walk before. Documents of a missing or empty named folder stay,
    since an unmounted disk looks the same; those of a missing file are removed. Raises UsageError if a path does not
    exist, KvtoolError if the operating system watches no more folders.
    """

    def __init__(self, place: Path, options: WatchOptions) -> None:
        self._place = place
        self._options = replace(options, paths=tuple(map(as_on_disk, options.paths)))
        self._kept = KeptModel()
        self._seen: Mapping[str, _Stamp] | None = None  # the files of the last round
        self._reported: set[object] = set()
        self._again_at = float("inf")
        self._forgotten: set[Path] = set()  # named files that are gone, and whose documents are to go
        self._roots = self._look()
        for path, state in self._roots.items():
            if state is None and not path.is_dir():
                raise UsageError(f"no such file or folder: {path}", "name what is there, or the folder above it")
        self._changes = self._listening()

    def close(self) -> None:
        self._changes.close()

    def wait(self) -> None:
        while not self._changes.wait(_LOOK_S) and self._look() == self._roots and time.monotonic() < self._again_at:
            pass

    def round(self, events: Events) -> IngestReport | None:
        """Update the store; None without changes, or if it is busy. Raises errors that later rounds would repeat."""
        self._follow_roots(events)
        paths = tuple(path for path, state in self._roots.items() if state or path in self._forgotten)
        found = self._walked(paths)
        if found == self._seen and not self._forgotten and time.monotonic() < self._again_at:
            return None
        if not found and (not paths or is_new(self._place)):
            self._seen, self._again_at = found, float("inf")
            return None
        return self._ingest(paths, found, events)

    def _walked(self, paths: Sequence[Path]) -> Mapping[str, _Stamp]:
        if not paths:
            return {}
        walked = walk(replace(self._options, paths=tuple(paths)), self._options.reading, lambda path: True)
        return {file.name: (file.size, file.mtime_ns, file.ctime_ns) for file in walked.files}

    def _is_as(self, paths: Sequence[Path], found: Mapping[str, _Stamp]) -> bool:
        try:
            return self._walked(paths) == found
        except KvtoolError:  # a named folder is gone
            return False

    def _ingest(self, paths: tuple[Path, ...], found: Mapping[str, _Stamp], events: Events) -> IngestReport | None:
        is_first, self._again_at = self._seen is None, float("inf")
        report = None
        try:
            options = replace(self._options, paths=paths, sync=True)
            # Texts come first: of what has changed, before the rest of the KV.
            events = replace(events, is_over=lambda: self._changes.wait(0) and not self._is_as(paths, found))
            report = ingest(self._place, options, self._once(events, found), self._kept)
            if report.left is not None and report.left.reason == "changes":
                self._again_at = time.monotonic()
        except (StoreLockedError, NoSpaceError) as error:
            events.warn(error.message, f"tried again in {_AGAIN_S:.0f} seconds")
            self._again_at = time.monotonic() + _AGAIN_S
            self._seen = self._seen or {}
            return None
        except UsageError as error:
            if is_first:
                raise
            events.warn(error.message, error.hint)
        self._seen = found
        self._forgotten.clear()
        return report

    def _once(self, events: Events, found: Mapping[str, object]) -> Events:
        """Return callbacks that report each message once: every round meets the same unreadable file."""

        def is_new(*what: object) -> bool:
            known = what in self._reported
            self._reported.add(what)
            return not known

        return replace(
            events,
            warn=lambda text, hint: events.warn(text, hint) if is_new(text, hint) else None,
            failed=lambda path, why: events.failed(path, why) if is_new(path, why, found.get(path)) else None,
        )

    # ---- the named paths ----

    def _follow_roots(self, events: Events) -> None:
        before, self._roots = self._roots, self._look()
        for path, state in self._roots.items():
            was = before[path]
            if state is not None:
                self._forgotten.discard(path)
            elif path.is_dir() or (was is not None and was[0] == "folder"):
                if was is not None or self._seen is None:
                    events.warn(f"nothing is at {path} now", "what the store holds of it stays until something is")
            elif was is not None:
                self._forgotten.add(path)
        if self._changes.lost or _folders(before) != _folders(self._roots):
            self.close()
            self._changes = self._listening()

    def _listening(self) -> Changes:
        return Changes(list(_folders(self._roots)), self._options.debounce)

    def _look(self) -> dict[Path, _State | None]:
        return {path: _state(path) for path in self._options.paths}


def _folders(roots: Mapping[Path, _State | None]) -> dict[Path, _State]:
    return {path: state for path, state in roots.items() if state is not None and state[0] == "folder"}


def _state(path: Path) -> _State | None:
    """Return the state of a path; None if it is missing, an empty folder, or cannot be looked at."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(status.st_mode):
        return ("folder", status.st_dev, status.st_ino) if holds_anything(path) else None
    return "file", status.st_size, status.st_mtime_ns


_TURN_S = 0.25  # within which the loss of a folder, and `close`, are noticed
_LONGEST = 20  # times `quiet`, after which files that keep changing are read


class Changes:
    """Notification of changes below folders, after `quiet` seconds without one. Events can be lost, doubled or late."""

    def __init__(self, folders: Sequence[Path], quiet: float) -> None:
        self._folders, self._quiet = [os.path.realpath(folder) for folder in folders], quiet
        self.lost = False  # whether one of the folders was removed or moved, and is no longer watched
        self._error: Exception | None = None
        self._ready, self._happened, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._listen, name="kvtool-watch", daemon=True)
        if folders:
            self._thread.start()
            self._ready.wait()  # from here on no change is missed
        self._check()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self, seconds: float) -> bool:
        happened = self._happened.wait(seconds)
        self._happened.clear()
        self._check()
        return happened

    def _check(self) -> None:
        if self._error is None or self.lost:
            return
        raise KvtoolError(
            f"cannot watch {', '.join(self._folders)}: {self._error}",
            "more folders can be watched with a higher fs.inotify.max_user_watches; WATCHFILES_FORCE_POLLING=1 "
            "looks at the files instead",
        ) from self._error

    def _listen(self) -> None:
        from watchfiles import Change, watch

        try:
            for changes in watch(
                *self._folders,
                watch_filter=None,
                step=round(1000 * self._quiet),
                debounce=round(1000 * self._quiet * _LONGEST),
                rust_timeout=round(1000 * _TURN_S),
                yield_on_timeout=True,
                stop_event=self._ended,
                ignore_permission_denied=True,
            ):
                self._ready.set()
                self.lost |= any(what == Change.deleted and path in self._folders for what, path in changes)
                if changes:
                    self._happened.set()
        except Exception as error:
            self._error = error
            self.lost |= isinstance(error, FileNotFoundError)  # gone between the look at it and this
        finally:
            self._ready.set()
            self._happened.set()
