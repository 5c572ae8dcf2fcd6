"""Types that many rooms share, the progress events of a job, and the timeline of a query."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Ids = tuple[int, ...]
"""Token ids."""

Warn = Callable[[str, str], None]
"""Told what a user should know although the work went on: a text, and a hint that may be empty."""


def warn_nobody(*_: Any) -> None:
    """Ignore a warning, or another event; the default where nobody listens."""


@dataclass(frozen=True, slots=True)
class Events:
    """Callbacks of a running job; by default they do nothing."""

    step: Callable[[str, int, str], None] = warn_nobody  # label, total, unit: the part before it is over
    advance: Callable[[float], None] = warn_nobody  # more units of this part that are done, whole or not
    status: Callable[[str], None] = warn_nobody  # a part of the work that has no count
    say: Callable[[str, str], None] = warn_nobody  # text, hint: what the user should know beforehand
    warn: Warn = warn_nobody
    failed: Callable[[str, str], None] = warn_nobody  # path, reason
    skipped: Callable[[str, str], None] = warn_nobody  # path, reason
    took: Callable[[str, str, int], None] = warn_nobody  # path; `added`, `changed` or `removed`; its chunks
    is_over: Callable[[], bool] = lambda: False  # whether no more KV is to be computed in this run


@dataclass(slots=True)
class Timeline:
    """A query's spans of any thread in Chrome's trace format (`KVTOOL_TIMELINE=FILE kvtool query`) for ui.perfetto.dev.
    On a GPU a span is the time in which work was handed over."""

    _spans: list[dict[str, Any]] = field(default_factory=list)
    _threads: dict[int, str] = field(default_factory=dict)

    def add(self, name: str, started: float, ended: float, **facts: Any) -> None:
        """Add a span of this thread; times are `time.perf_counter()` seconds."""
        thread = threading.get_ident()
        self._threads.setdefault(thread, threading.current_thread().name)
        span = {"name": name, "ph": "X", "ts": started * 1e6, "dur": (ended - started) * 1e6, "tid": thread}
        self._spans.append(span | {"pid": os.getpid(), "args": facts})

    def write(self, path: Path) -> None:
        first = min((span["ts"] for span in self._spans), default=0.0)
        rows: list[dict[str, Any]] = [span | {"ts": span["ts"] - first} for span in self._spans]
        names = [
            {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": thread, "args": {"name": name}}
            for thread, name in self._threads.items()
        ]
        path.write_text(json.dumps({"traceEvents": names + rows, "displayTimeUnit": "ms"}), encoding="utf-8")


def process_started() -> float | None:
    """Return when this process began, as `time.perf_counter()` counts, to 10 ms; None if the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.perf_counter() - (since_boot - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError, IndexError):
        return None


def add_span(timeline: Timeline | None, name: str, started: float, **facts: Any) -> float:
    """Add a span that ends now, where a timeline is wanted; returns the seconds it took."""
    ended = time.perf_counter()
    if timeline is not None:
        timeline.add(name, started, ended, **facts)
    return ended - started
