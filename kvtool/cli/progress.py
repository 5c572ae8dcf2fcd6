"""How far a long job is: a bar on a terminal, else a line or an event now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from kvtool.cli.streams import SafeStream
from kvtool.cli.text import one_line

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

STATUS_EVERY_S = 10.0  # a line at -v where no bar can be drawn
EVENT_EVERY_S = 1.0
ALOUD_EVERY_S = 2.0  # of a bench, whose parts are long and whose figures wait for the last


class Progress(Protocol):
    """A long job's progress; `out.progress()` yields one."""

    def advance(self, amount: float = 1) -> None:
        """So much more is done."""

    def describe(self, label: str) -> None:
        """It is on this now."""


_Say = Callable[[str, dict[str, Any]], None]  # a sentence, and the facts in it


class Lines:
    """A status now and then, where no bar can be drawn; silent when `say` is None."""

    def __init__(self, say: _Say | None, label: str, total: float | None, unit: str, every: float) -> None:
        self._say, self._label, self._total, self._unit, self._every = say, label, total, unit, every
        self._done = 0.0
        self._start = self._last = time.monotonic()
        if every == ALOUD_EVERY_S:
            self._last -= every  # what is done first is said at once: it names what the figures will be of
        self._told = label

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if self._say and now - self._last >= self._every:
            self._last, self._told = now, self._label
            speed = self._done / max(now - self._start, 1e-9)
            of = f"/{self._total:g}" if self._total else ""
            facts = {"done": round(self._done, 2), "total": self._total, "unit": self._unit, "per_second": speed}
            self._say(f"{self._label}: {round(self._done, 2):g}{of} {self._unit}, {speed:.1f} {self._unit}/s", facts)

    def describe(self, label: str) -> None:
        self._label = one_line(label)
        now = time.monotonic()
        if self._say and self._label != self._told and now - self._last >= self._every:
            self._last, self._told = now, self._label
            self._say(self._label, {})


class Bar:
    """A bar with speed and ETA, drawn by rich."""

    def __init__(self, bars: RichProgress, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def advance(self, amount: float = 1) -> None:
        self._bars.advance(self._task, amount)

    def describe(self, label: str) -> None:
        self._bars.update(self._task, description=one_line(label))


def speed_text(speed: float | None, unit: str) -> str:
    """A speed in `unit` a second, with a digit or two behind the point where it is slow; a dash before there is one."""
    if not speed:
        return f"- {unit}/s"
    return f"{speed:,.{0 if speed >= 10 else 1 if speed >= 0.1 else 2}f} {unit}/s"


def rich_bars(stream: SafeStream, unit: str) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class SpeedColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(speed_text(task.speed, unit))

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), SpeedColumn())
    console = Console(file=cast(IO[str], stream), markup=False, highlight=False, emoji=False)
    return RichProgress(*columns, TimeRemainingColumn(), console=console, transient=True)
