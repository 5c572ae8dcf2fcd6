"""Change notification below folders, by the operating system and the library `watchfiles`."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from kvtool.core.errors import KvtoolError

_TURN_S = 0.25  # the listening thread looks up so often; a folder's loss is seen, and a `close` is heard, in that time
_LONGEST = 20  # times the quiet: files that never rest are read all the same


class Changes:
    """Listens below folders, in a thread: the main one has to hear signals.

    Which files changed is not told. Events can be lost, doubled and out of order; whoever is told that something
    happened looks for himself.

    Parameters
    ----------
    folders : watched with all that is below them.
    quiet : seconds for which nothing may change before the changes up to then are told.

    Raises
    ------
    KvtoolError : the operating system watches no more folders.

    Attributes
    ----------
    lost : one of the folders itself was removed or moved, and is not watched any more.
    """

    def __init__(self, folders: Sequence[Path], quiet: float) -> None:
        self._folders, self._quiet = [os.path.realpath(folder) for folder in folders], quiet
        self.lost = False
        self._error: Exception | None = None
        self._ready, self._happened, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._listen, name="kvtool-watch", daemon=True)
        if folders:
            self._thread.start()
            self._ready.wait()  # from here on nothing that happens is missed
        self._check()

    def close(self) -> None:
        """End listening."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self, seconds: float) -> bool:
        """Wait until something happened, for at most so long; whether it did."""
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
