"""Progress of a command: a spinner before its first line, then a bar on a terminal, or lines and events; where nothing
can be drawn, a line of whatever takes long."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from kvtool.cli.terminal import SafeStream, one_line

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

STATUS_EVERY_S = 10.0  # a line at -v where no bar can be drawn
EVENT_EVERY_S = 1.0
PLAIN_AFTER_S, PLAIN_EVERY_S = 5.0, 30.0  # a line of what is being done, where no bar can be drawn
ALOUD_EVERY_S = 2.0  # of a bench, whose parts are long and whose figures wait for the last

_WINDOW_S, _STEP_S, _FEWEST_STEPS = 60.0, 0.5, 4  # of a speed: seconds, those that are one step, and steps at least
_FORETELLS = 0.1  # share of the work that foretells the rest, however few its steps are


class Progress(Protocol):
    def advance(self, amount: float = 1) -> None:
        """Count this much as done."""

    def expect(self, total: float) -> None:
        """Set the expected total."""

    def describe(self, label: str) -> None:
        """Set the label of the present step."""

    def text(self) -> str:
        """Say how far it is."""


_Say = Callable[[str, dict[str, Any]], None]  # a sentence, and the facts in it


class Pace:
    """Progress and speed of a job over the last minute, or over its last steps if these take longer.

    Between two steps the time that is left runs down; it changes only at steps.
    """

    def __init__(self, total: float | None, unit: str) -> None:
        self.total, self.unit, self.done = total, unit, 0.0
        self._steps = deque([(time.monotonic(), 0.0)])

    def advance(self, amount: float) -> float:
        now = time.monotonic()
        self.done += amount
        if len(self._steps) > 2 and now - self._steps[-2][0] < _STEP_S:
            self._steps.pop()
        self._steps.append((now, self.done))
        while len(self._steps) > _FEWEST_STEPS and self._steps[1][0] < now - _WINDOW_S:
            self._steps.popleft()
        return now

    @property
    def speed(self) -> float | None:
        """Units a second; None before the first step."""
        (first, before), (last, done) = self._steps[0], self._steps[-1]
        return (done - before) / (last - first) if done > before and last > first else None

    @property
    def left(self) -> float | None:
        """Seconds that it will take; None where that is not known: the first steps of many have to warm up."""
        if not self.speed or not self.total:
            return None
        if len(self._steps) < _FEWEST_STEPS and self.done < _FORETELLS * self.total:
            return None
        return max(0.0, (self.total - self.done) / self.speed - (time.monotonic() - self._steps[-1][0]))

    def text(self) -> str:
        of = f"/{self.total:,.0f}" if self.total else ""
        parts = [f"{self.done:,.0f}{of} {self.unit}", speed_text(self.speed, self.unit)]
        if self.left is not None and self.done < (self.total or 0):
            parts.append(f"{timedelta(seconds=seconds)} left" if (seconds := round(self.left)) else "finishing")
        return ", ".join(filter(None, parts))


class Lines:
    """A status now and then, where no bar can be drawn; silent when `say` is None."""

    def __init__(
        self,
        say: _Say | None,
        label: str,
        total: float | None,
        unit: str,
        every: float,
        stepped: Callable[[], None] = lambda: None,
    ) -> None:
        self._say, self._label, self._every, self._stepped = say, label, every, stepped
        self._pace = Pace(total, unit)
        self._last = time.monotonic()
        if every == ALOUD_EVERY_S:
            self._last -= every  # what is done first is said at once: it names what the figures will be of
        self._shown = label

    def advance(self, amount: float = 1) -> None:
        now = self._pace.advance(amount)
        self._stepped()
        if self._say and now - self._last >= self._every:
            self._last, self._shown = now, self._label
            pace = self._pace
            facts = {"done": round(pace.done, 2), "total": pace.total, "unit": pace.unit, "per_second": pace.speed}
            self._say(self.text(), facts | {"seconds_left": pace.left})

    def expect(self, total: float) -> None:
        self._pace.total = total

    def describe(self, label: str) -> None:
        self._label = one_line(label)
        now = time.monotonic()
        if self._say and self._label != self._shown and now - self._last >= self._every:
            self._last, self._shown = now, self._label
            self._say(self._label, {})

    def text(self) -> str:
        return f"{self._label}: {self._pace.text()}"


class Bar:
    def __init__(self, bars: RichProgress, label: str, total: float | None, unit: str) -> None:
        self._bars, self._pace = bars, Pace(total, unit)
        self._task = bars.add_task(label, total=total, pace=self._pace)

    def advance(self, amount: float = 1) -> None:
        self._pace.advance(amount)
        self._bars.advance(self._task, amount)

    def expect(self, total: float) -> None:
        self._pace.total = total
        self._bars.update(self._task, total=total)

    def describe(self, label: str) -> None:
        self._bars.update(self._task, description=one_line(label))

    def show_pace(self, shown: bool) -> None:
        self._bars.update(self._task, pace=self._pace if shown else None)

    def text(self) -> str:
        return self._pace.text()


def speed_text(speed: float | None, unit: str) -> str:
    """A speed in `unit` a second, with one or two decimals if it is slow; empty before there is one."""
    if not speed:
        return ""
    return f"{speed:,.{0 if speed >= 10 else 1 if speed >= 0.1 else 2}f} {unit}/s"


def rich_bars(stream: SafeStream) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class PaceColumn(ProgressColumn):
        """In place of rich's own columns: these know no speed where a step takes longer than their window."""

        def render(self, task: Task) -> Text:
            pace: Pace | None = task.fields["pace"]
            return Text(pace.text() if pace else "")

    columns = (TextColumn("{task.description}", markup=False), BarColumn(12), PaceColumn())  # within 80 columns
    console = Console(file=cast(IO[str], stream), markup=False, highlight=False, emoji=False)
    return RichProgress(*columns, console=console, transient=True)


# ---- the spinner: drawn by a thread, from before torch is imported, which takes seconds ----

PATIENCE_S = 0.2  # before the first word
_FRAME_EVERY_S = 0.1
_CLEARED = "\r\x1b[2K"
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ASCII_FRAMES = "|/-\\"


class Spinner:
    """A line at the bottom of a terminal that shows the present activity; none if `stream` is no terminal.

    Other writers to the same terminal write inside of `aside`.
    """

    def __init__(self, stream: SafeStream) -> None:
        self._stream = stream
        self._words = ""
        self._drawn = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._frames = _FRAMES if stream.encoding.lower().replace("-", "") == "utf8" else _ASCII_FRAMES
        self._thread: threading.Thread | None = None

    def say(self, words: str, report: Callable[[], str] | None = None) -> None:
        if os.environ.get("TERM") == "dumb" or not self._stream.isatty() or self._over.is_set():
            return
        with self._lock:
            self._words = one_line(words)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtool-spinner", daemon=True)
            self._thread.start()

    @contextmanager
    def aside(self, until_new_words: bool = False) -> Iterator[None]:
        """Clear the line while other code writes; restore it afterwards, or only when there are new words."""
        with self._lock:
            if until_new_words:
                self._words = ""
            if self._drawn:
                self._write(_CLEARED)
                self._drawn = False
            yield

    def stop(self) -> None:
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
            pause = _FRAME_EVERY_S

    def _draw(self, frame: str) -> None:
        room = max(10, shutil.get_terminal_size().columns - 3)
        self._write(f"{_CLEARED}{frame} {self._words[:room]}")
        self._drawn = True

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


class Ticker:
    """Lines about what takes long, in place of a spinner where nothing can be drawn: one when an activity has taken
    `PLAIN_AFTER_S`, and one every `PLAIN_EVERY_S`, however short the activities are."""

    def __init__(self, put: Callable[[str], None]) -> None:
        self._put = put
        self._words, self._report = "", _nothing
        self._began = self._last = self._ended = time.monotonic()
        self._is_new = False  # no line has named the activity yet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtool-ticker", daemon=True)
        self._thread.start()

    def say(self, words: str, report: Callable[[], str] | None = None) -> None:
        now = time.monotonic()
        if not self._words:
            self._last += now - self._ended  # nothing was done meanwhile
        if words != self._words:
            self._words, self._began, self._is_new = words, now, True
        self._report = report or self._lasting

    @contextmanager
    def aside(self, until_new_words: bool = False) -> Iterator[None]:
        """Let others write; with `until_new_words` the activity is over."""
        if until_new_words and self._words:
            self._words, self._report, self._ended = "", _nothing, time.monotonic()
        yield

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def tick(self) -> None:
        now = time.monotonic()
        is_due = now - self._last >= PLAIN_EVERY_S or (self._is_new and now - self._began >= PLAIN_AFTER_S)
        if is_due and (text := self._report()):
            self._last, self._is_new = now, False
            self._put(text)

    def _lasting(self) -> str:
        lasted = round(time.monotonic() - self._began)
        return self._words if self._is_new else f"{self._words}, for {timedelta(seconds=lasted)}"

    def _run(self) -> None:
        while not self._over.wait(1.0):
            self.tick()


def _nothing() -> str:
    return ""


# That of the command that runs, as there is one terminal; none before one does, and where it is to be quiet.
_running: list[Spinner | Ticker] = []


@contextmanager
def spinning(words: str, stream: SafeStream, put: Callable[[str], None] | None = None) -> Iterator[None]:
    """Show a spinner while the block runs, first with these words. `put`: puts lines where it cannot be drawn."""
    is_drawn = stream.isatty() and os.environ.get("TERM") != "dumb"
    spinner = Spinner(stream) if is_drawn or put is None else Ticker(put)
    _running.append(spinner)
    spinner.say(words if is_drawn else "working")
    try:
        yield
    finally:
        spinner.stop()
        _running.remove(spinner)


def show_activity(words: str, report: Callable[[], str] | None = None) -> None:
    for spinner in _running[-1:]:
        spinner.say(words, report)


def hide_activity(until_new_words: bool = False) -> AbstractContextManager[None]:
    """See `Spinner.aside`; from any thread."""
    return _running[-1].aside(until_new_words) if _running else nullcontext()
