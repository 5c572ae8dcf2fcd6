"""Words on the terminal while nothing else is there to see: what a command is doing before its first line.

It is drawn by a thread, from before torch is imported, which takes seconds. A command that is faster than the patience
of a person never shows it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from kvtool.cli.terminal import SafeStream, one_line

PATIENCE_S = 0.2  # before the first word
_EVERY_S = 0.1
_CLEARED = "\r\x1b[2K"
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ASCII_FRAMES = "|/-\\"


class Spinner:
    """A line at the bottom of a terminal that shows the present activity; none if `stream` is no terminal.

    Whoever writes to the same terminal does so inside of `aside`.
    """

    def __init__(self, stream: SafeStream) -> None:
        self._stream = stream
        self._words = ""
        self._drawn = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._frames = _FRAMES if stream.encoding.lower().replace("-", "") == "utf8" else _ASCII_FRAMES
        self._thread: threading.Thread | None = None

    def say(self, words: str) -> None:
        """Show these words from now on."""
        if os.environ.get("TERM") == "dumb" or not self._stream.isatty() or self._over.is_set():
            return
        with self._lock:
            self._words = one_line(words)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtool-spinner", daemon=True)
            self._thread.start()

    @contextmanager
    def aside(self, until_new_words: bool = False) -> Iterator[None]:
        """Take the line away while somebody else writes; it comes back, or stays away until there are new words."""
        with self._lock:
            if until_new_words:
                self._words = ""
            if self._drawn:
                self._write(_CLEARED)
                self._drawn = False
            yield

    def stop(self) -> None:
        """Take the line away for good."""
        self._over.set()
        with self.aside(until_new_words=True):
            pass

    def _run(self) -> None:
        pause = PATIENCE_S
        for frame in itertools.cycle(self._frames):
            if self._over.wait(pause):
                return
            with self._lock:
                if self._words and not self._over.is_set():
                    self._draw(frame)
            pause = _EVERY_S

    def _draw(self, frame: str) -> None:
        room = max(10, shutil.get_terminal_size().columns - 3)
        self._write(f"{_CLEARED}{frame} {self._words[:room]}")
        self._drawn = True

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


# That of the command that runs, as there is one terminal; none before one does, and where it is to be quiet.
_running: list[Spinner] = []


@contextmanager
def spinning(words: str, stream: SafeStream) -> Iterator[None]:
    """Show that something goes on while what is inside runs, beginning with these words."""
    spinner = Spinner(stream)
    _running.append(spinner)
    spinner.say(words)
    try:
        yield
    finally:
        spinner.stop()
        _running.remove(spinner)


def say(words: str) -> None:
    """Show these words from now on, where anything is shown."""
    for spinner in _running[-1:]:
        spinner.say(words)


def aside(until_new_words: bool = False) -> AbstractContextManager[None]:
    """See `Spinner.aside`; from any thread."""
    return _running[-1].aside(until_new_words) if _running else nullcontext()
