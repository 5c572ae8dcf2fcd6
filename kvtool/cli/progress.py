"""Progress of a long job: a bar on a terminal, else a line or an event now and then."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from kvtool.cli.terminal import SafeStream, one_line

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

STATUS_EVERY_S = 10.0  # a line at -v where no bar can be drawn
EVENT_EVERY_S = 1.0
PLAIN_EVERY_S = 30.0  # a line of a job where no bar can be drawn, whether -v is given or not
ALOUD_EVERY_S = 2.0  # of a bench, whose parts are long and whose figures wait for the last

_WINDOW_S, _STEP_S, _FEWEST_STEPS = 60.0, 0.5, 4  # of a speed: seconds, those that are one step, and steps at least


class Progress(Protocol):
    """A long job's progress; `out.progress()` yields one."""

    def advance(self, amount: float = 1) -> None:
        """Count this much as done."""

    def expect(self, total: float) -> None:
        """Set the expected total."""

    def describe(self, label: str) -> None:
        """Set the label of the present step."""

    def told(self) -> str:
        """Say how far it is."""


_Say = Callable[[str, dict[str, Any]], None]  # a sentence, and the facts in it


class Pace:
    """Progress and speed of a job over the last minute, or over its last steps if these take longer.

    Between two steps the time that is left runs down; it changes at steps alone.
    """

    def __init__(self, total: float | None, unit: str) -> None:
        self.total, self.unit, self.done = total, unit, 0.0
        self._steps = deque([(time.monotonic(), 0.0)])

    def advance(self, amount: float) -> float:
        """Count a step; returns when it was."""
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
        """Seconds that it will take; None where that is not known."""
        if not self.speed or not self.total:
            return None
        return max(0.0, (self.total - self.done) / self.speed - (time.monotonic() - self._steps[-1][0]))

    def told(self) -> str:
        """Say it: `1,200/40,000 tokens, 310 tokens/s, 2:05 left`."""
        of = f"/{self.total:,.0f}" if self.total else ""
        parts = [f"{self.done:,.0f}{of} {self.unit}", speed_text(self.speed, self.unit)]
        if self.left is not None and self.done < (self.total or 0):
            parts.append(f"{timedelta(seconds=round(self.left))} left")
        return ", ".join(filter(None, parts))


class Lines:
    """A status now and then, where no bar can be drawn; silent when `say` is None."""

    def __init__(self, say: _Say | None, label: str, total: float | None, unit: str, every: float) -> None:
        self._say, self._label, self._every = say, label, every
        self._pace = Pace(total, unit)
        self._last = time.monotonic()
        if every == ALOUD_EVERY_S:
            self._last -= every  # what is done first is said at once: it names what the figures will be of
        self._told = label

    def advance(self, amount: float = 1) -> None:
        now = self._pace.advance(amount)
        if self._say and now - self._last >= self._every:
            self._last, self._told = now, self._label
            pace = self._pace
            facts = {"done": round(pace.done, 2), "total": pace.total, "unit": pace.unit, "per_second": pace.speed}
            self._say(self.told(), facts | {"seconds_left": pace.left})

    def expect(self, total: float) -> None:
        self._pace.total = total

    def describe(self, label: str) -> None:
        self._label = one_line(label)
        now = time.monotonic()
        if self._say and self._label != self._told and now - self._last >= self._every:
            self._last, self._told = now, self._label
            self._say(self._label, {})

    def told(self) -> str:
        return f"{self._label}: {self._pace.told()}"


class Bar:
    """A bar with speed and the time that is left, drawn by rich."""

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
        """Show how far it is, or nothing of that while something goes on that has no count."""
        self._bars.update(self._task, pace=self._pace if shown else None)

    def told(self) -> str:
        return self._pace.told()


class Reminder:
    """Says something again and again, from a thread, as long as it is open.

    Parameters
    ----------
    say : called every so many seconds.
    """

    def __init__(self, say: Callable[[], None], every: float) -> None:
        self._say, self._every, self._over = say, every, threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtool-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it; what is being said is said."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._every):
            self._say()


def speed_text(speed: float | None, unit: str) -> str:
    """A speed in `unit` a second, with a digit or two behind the point where it is slow; empty before there is one."""
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
            return Text(pace.told() if pace else "")

    columns = (TextColumn("{task.description}", markup=False), BarColumn(12), PaceColumn())  # within 80 columns
    console = Console(file=cast(IO[str], stream), markup=False, highlight=False, emoji=False)
    return RichProgress(*columns, console=console, transient=True)
