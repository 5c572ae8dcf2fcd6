"""Progress of a command: a spinner or a bar, drawn by rich on a terminal; a line now and then elsewhere."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from math import ceil
from typing import IO, TYPE_CHECKING, Any, cast

from kvtool.cli.terminal import SafeStream, one_line

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import Task

PATIENCE_S = 0.2  # before a spinner is drawn
LOG_EVERY_S, VERBOSE_EVERY_S, EVENT_EVERY_S = 30.0, 10.0, 1.0  # between two lines where nothing can be drawn
_WINDOW_S = 300.0  # of a speed: rich knows none where a step takes longer
_FORECAST_SHARE = 0.05  # of the work, after which the time left is estimated: the first step warms up the model
_FRAMES_PER_S = 10.0


class Bar:
    """A step of a job that is counted. `show` draws or logs it after each change."""

    def __init__(
        self, bars: RichProgress, label: str, total: float | None, unit: str, show: Callable[[Bar], None]
    ) -> None:
        self.label, self._unit, self._bars, self._show = label, unit, bars, show
        self._id = bars.add_task(label, total=total, unit=unit)
        bars.advance(self._id, 0)  # a speed counts from here

    @property
    def task(self) -> Task:
        return self._bars.tasks[0]

    def advance(self, amount: float = 1) -> None:
        """Count this much as done."""
        self._bars.advance(self._id, amount)
        self._show(self)

    def text(self) -> str:
        return f"{self.label}: {pace_text(self.task)}"

    def facts(self) -> dict[str, Any]:
        """Return what an event of `--jsonl` says."""
        task = self.task
        counts = {"done": round(task.completed, 2), "total": task.total, "unit": self._unit}
        return counts | {"per_second": task.speed, "seconds_left": seconds_left(task)}


def seconds_left(task: Task) -> float | None:
    """None where it is not known."""
    if not task.total or not task.speed or task.completed < _FORECAST_SHARE * task.total:
        return None
    return max(0.0, (task.total - task.completed) / task.speed)


def pace_text(task: Task) -> str:
    of = f"/{task.total:,.0f}" if task.total else ""
    unit, left = task.fields["unit"], ceil(seconds_left(task) or 0)
    parts = [f"{task.completed:,.0f}{of} {unit}", speed_text(task.speed, unit)]
    return ", ".join(filter(None, [*parts, f"{timedelta(seconds=left)} left" if left else ""]))


def speed_text(speed: float | None, unit: str) -> str:
    """A speed in `unit` a second, with one or two decimals if it is slow; empty before there is one."""
    if not speed:
        return ""
    return f"{speed:,.{0 if speed >= 10 else 1 if speed >= 0.1 else 2}f} {unit}/s"


def rich_bars(stream: SafeStream, is_counted: bool = True) -> RichProgress:
    """Bars that are counted, or a spinner; drawn where a `Screen` shows them."""
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class PaceColumn(ProgressColumn):
        """The count, the speed and the time left; empty while something else than the count is described."""

        def render(self, task: Task) -> Text:
            return Text(pace_text(task) if task.fields.get("is_counting", True) else "")

    console = Console(file=cast(IO[str], stream), markup=False, highlight=False, emoji=False)
    words = TextColumn("{task.description}", markup=False)
    spinner = SpinnerColumn("line" if console.options.ascii_only else "dots", style=None)
    return RichProgress(
        *((words, BarColumn(12), PaceColumn()) if is_counted else (spinner, words)),  # within 80 columns
        console=console,
        transient=True,
        refresh_per_second=_FRAMES_PER_S,
        redirect_stdout=is_counted,  # other libraries' words come above a bar
        redirect_stderr=is_counted,
        speed_estimate_period=_WINDOW_S,
        get_time=time.monotonic,
    )


class Screen:
    """The last line of a terminal: a bar, or a spinner with the present activity. Other writers to the same terminal
    write inside `aside`.

    A thread draws it, from before torch is imported, which takes seconds.
    """

    def __init__(self, stream: SafeStream) -> None:
        self._stream, self._words = stream, ""
        self._bars: RichProgress | None = None
        self._shown: RichProgress | None = None
        self._lock = threading.RLock()
        self._is_ready = self._is_over = False
        self._timer = threading.Timer(PATIENCE_S, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def say(self, words: str, bar: Bar | None = None) -> None:
        """Name the present activity; with a bar, it is the bar's own."""
        with self._lock:
            if self._bars is None:
                self._words = one_line(words)
            if shown := self._bars or self._shown:
                shown.update(shown.task_ids[0], description=one_line(words), is_counting=bar is not None)
            self._draw()

    @contextmanager
    def bar(self, label: str, total: float | None, unit: str) -> Iterator[Bar]:
        """Show a bar in place of the spinner; within another step, count only."""
        bars = rich_bars(self._stream)
        if self._bars is not None:
            yield Bar(bars, label, total, unit, lambda bar: None)
            return
        bar = Bar(bars, label, total, unit, lambda bar: self.say(bar.label, bar))
        with self._lock:
            self._clear()
            self._words, self._bars, self._is_ready = "", bars, True
            self._draw()
        try:
            yield bar
        finally:
            with self._lock:
                self._clear()
                self._bars = None

    @contextmanager
    def aside(self, until_new_words: bool = False) -> Iterator[None]:
        """Clear the line while other code writes; restore it afterwards, a spinner only when there are new words."""
        with self._lock:
            if until_new_words:
                self._words = ""
            self._clear()
            yield
            self._draw()

    def stop(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            self._clear()

    def _begin(self) -> None:
        rich_bars(self._stream)  # imports rich before the lock is taken: nobody else has to wait for that
        with self._lock:
            self._is_ready = True
            self._draw()

    def _draw(self) -> None:
        if self._shown is not None or not self._is_ready or self._is_over or not (self._bars or self._words):
            return
        self._shown = self._bars or rich_bars(self._stream, is_counted=False)
        if self._bars is None:
            self._shown.add_task(self._words, total=None)
        with suppress(OSError, ValueError):
            self._shown.start()
            self._shown.console.show_cursor()  # a killed process leaves the terminal as it is

    def _clear(self) -> None:
        shown, self._shown = self._shown, None
        if shown is not None:
            with suppress(OSError, ValueError):
                shown.stop()


class Log:
    """Lines about a step that is counted, where nothing can be drawn: one `every` so many seconds, when it advances.
    `put` gets a line and the facts in it."""

    def __init__(self, put: Callable[[str, Mapping[str, Any]], None], every: float) -> None:
        self._put, self._every = put, every
        self._last = time.monotonic()

    @contextmanager
    def bar(self, label: str, total: float | None, unit: str) -> Iterator[Bar]:
        yield Bar(rich_bars(SafeStream(None)), label, total, unit, self._step)

    def _step(self, bar: Bar) -> None:
        if (now := time.monotonic()) - self._last >= self._every:
            self._last = now
            self._put(bar.text(), bar.facts())


# That of the command that runs, as there is one terminal; none before one does, and where it is to be quiet.
_running: list[Screen] = []


def can_draw(stream: SafeStream) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def showing(display: Screen, words: str) -> Iterator[None]:
    """Show the activity of the block on this display, first these words."""
    _running.append(display)
    try:
        display.say(words)
        yield
    finally:
        display.stop()
        _running.remove(display)


def running() -> Screen | None:
    return _running[-1] if _running else None


def show_activity(words: str) -> None:
    if display := running():
        display.say(words)


def hide_activity(until_new_words: bool = False) -> AbstractContextManager[None]:
    """See `Screen.aside`; from any thread."""
    return display.aside(until_new_words) if (display := running()) else nullcontext()
