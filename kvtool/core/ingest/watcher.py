"""A store that follows its files: an ingest with `--sync` whenever one of them changed."""

from __future__ import annotations

import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvtool.core.common.spelling import as_on_disk
from kvtool.core.common.types import Events
from kvtool.core.errors import NoSpaceError, StoreLockedError, UsageError
from kvtool.core.ingest.changes import Changes
from kvtool.core.ingest.ingest_report import IngestReport
from kvtool.core.ingest.job import KeptModel, ingest, is_new
from kvtool.core.ingest.options import WatchOptions
from kvtool.core.ingest.stream import walk
from kvtool.core.ingest.survey import holds_anything

_LOOK_S = 1.0  # the named paths themselves are looked at so often: a file that is replaced, a folder that comes back
_AGAIN_S = 30.0  # what could not be written for now is tried again
_Stamp = tuple[int, int, int]  # of a file: bytes, time of its change, time of any change of it
_State = tuple[str, int, int]  # "folder", its device and inode; "file", its bytes and the time of its change


class Watcher:
    """Brings a store up to date again and again. The model stays loaded; store and writer's lock are free in between.

    In each round the whole selection is walked, as an ingest does it, and held against the walk before: so no event of
    the operating system has to be understood, and a file that nobody selected takes no lock. A named folder that is
    gone as a whole, or empty, is no reason to forget, since a disk that was taken out looks like that; a file in a
    folder, and a named file, is.

    Parameters
    ----------
    place : folder of the store; made on need.

    Raises
    ------
    UsageError : a path does not exist.
    KvtoolError : the operating system watches no more folders.
    """

    def __init__(self, place: Path, options: WatchOptions) -> None:
        self._place = place
        self._options = replace(options, paths=tuple(map(as_on_disk, options.paths)))
        self._kept = KeptModel()
        self._seen: Mapping[str, _Stamp] | None = None  # the files of the last round
        self._told: set[object] = set()
        self._again_at = float("inf")
        self._forgotten: set[Path] = set()  # named files that are gone, and whose documents are to go
        self._roots = self._look()
        for path, state in self._roots.items():
            if state is None and not path.is_dir():
                raise UsageError(f"no such file or folder: {path}", "name what is there, or the folder above it")
        self._changes = self._listening()

    def close(self) -> None:
        """End listening."""
        self._changes.close()

    def wait(self) -> None:
        """Wait until a file may have changed."""
        while not self._changes.wait(_LOOK_S) and self._look() == self._roots and time.monotonic() < self._again_at:
            pass

    def round(self, events: Events) -> IngestReport | None:
        """Bring the store up to date; None where nothing that is selected changed, or could not be written for now.

        Raises
        ------
        KvtoolError : what no later round would mend, such as a model that cannot be loaded; in the first round also
            where nothing at all could be read.
        """
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
        walked = walk(replace(self._options, paths=tuple(paths)), lambda path: True)
        return {file.name: (file.size, file.mtime_ns, file.ctime_ns) for file in walked.files}

    def _ingest(self, paths: tuple[Path, ...], found: Mapping[str, _Stamp], events: Events) -> IngestReport | None:
        is_first, self._again_at = self._seen is None, float("inf")
        report = None
        try:
            options = replace(self._options, paths=paths, sync=True)
            report = ingest(self._place, options, self._once(events, found), self._kept)
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
        """Events that tell each thing once: a file that cannot be read is met in every round."""

        def is_new(*what: object) -> bool:
            known = what in self._told
            self._told.add(what)
            return not known

        return replace(
            events,
            warn=lambda text, hint: events.warn(text, hint) if is_new(text, hint) else None,
            failed=lambda path, why: events.failed(path, why) if is_new(path, why, found.get(path)) else None,
        )

    # ---- the named paths ----

    def _follow_roots(self, events: Events) -> None:
        """See which of them are there, and listen to the folders that are."""
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
