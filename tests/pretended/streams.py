"""Streams of a GPU that is as late as it may be: nothing runs before somebody waits for it.

So a tensor that is read in another stream without an event between, and pinned memory that is written anew before its
copy has run, show in the numbers.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

Work = Callable[[], None]
CUDA = torch.device("cuda:0")
turn = threading.RLock()  # a device has one driver
_here = threading.local()


@dataclass(eq=False)
class Stream:
    """Work in order, of which the first `done` pieces have run."""

    queue: list[Work] = field(default_factory=list)
    done: int = 0
    device = CUDA

    def put(self, work: Work) -> None:
        """Do this after all that was put before; while a graph is captured, keep it for its replays."""
        graph = capturing()
        if graph is not None:
            graph.works.append(work)
            return
        with turn:
            self.queue.append(work)

    def run(self, upto: int | None = None) -> None:
        """Do all that was put, or its first `upto` pieces."""
        with turn:
            upto = len(self.queue) if upto is None else upto
            while self.done < upto:
                work, self.queue[self.done] = self.queue[self.done], _nothing
                self.done += 1
                with torch.inference_mode():  # as for the caller that queued it
                    work()

    def wait_stream(self, other: Stream) -> None:
        Event().record(other).wait(self)

    def synchronize(self) -> None:
        log.note("stream.synchronize")
        self.run()


class Event:
    """A place in a stream; none before it is recorded."""

    def __init__(self, *ignored: Any, **named: Any) -> None:
        self.at: tuple[Stream, int] | None = None
        self.when = 0.0

    def record(self, stream: Stream | None = None) -> Event:
        stream = stream or current()
        with turn:
            self.at, self.when = (stream, len(stream.queue)), time.perf_counter()
        return self

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait; what is recorded later does not count."""
        at = self.at
        if at is not None:
            (stream or current()).put(lambda: at[0].run(at[1]))

    def synchronize(self) -> None:
        if self.at is not None:
            self.at[0].run(self.at[1])

    def query(self) -> bool:
        return self.at is None or self.at[0].done >= self.at[1]

    def elapsed_time(self, other: Event) -> float:
        """Between the two recordings: any number that is one."""
        return max(1e-3, (other.when - self.when) * 1e3)


class Graph:
    """A CUDA graph: what was put into the capturing thread's stream, as often as it is replayed."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.broken = False

    def capture_begin(self, capture_error_mode: str = "global") -> None:
        if current() is _default:
            raise RuntimeError("a capture needs a stream beside the default one")
        _here.graph = self

    def capture_end(self) -> None:
        _here.graph = None
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        for work in self.works:
            current().put(work)


def capturing() -> Graph | None:
    graph: Graph | None = getattr(_here, "graph", None)
    return graph


def _nothing() -> None:
    """What has run is let go of."""


@dataclass
class Log:
    """A log of the waits of a GPU, each with the line of kvtool that asked."""

    waits: list[tuple[str, str]] = field(default_factory=list)

    def note(self, operation: Any) -> None:
        graph = capturing()
        if graph is not None:
            graph.broken = True
            raise RuntimeError(f"operation not permitted when stream is capturing: {operation}")
        frames = [frame for frame in traceback.extract_stack() if "/kvtool/" in frame.filename]
        line = f"{frames[-1].filename.rpartition('/kvtool/')[2]}:{frames[-1].lineno}" if frames else "elsewhere"
        self.waits.append((str(operation), line))

    def lines(self) -> dict[str, int]:
        """How often each line waited."""
        found: dict[str, int] = {}
        for operation, line in self.waits:
            key = f"{line} {operation}"
            found[key] = found.get(key, 0) + 1
        return found


log = Log()
_default = Stream()
_streams: list[Stream] = [_default]


def new(*ignored: Any, **named: Any) -> Stream:
    _streams.append(Stream())
    return _streams[-1]


def current(device: Any = None) -> Stream:
    stream: Stream = getattr(_here, "stream", _default)
    return stream


@contextlib.contextmanager
def on(stream: Stream | None) -> Iterator[None]:
    before, _here.stream = current(), stream or current()
    try:
        yield
    finally:
        _here.stream = before


def finish(device: Any = None) -> None:
    log.note("cuda.synchronize")
    for stream in _streams:
        stream.run()


def forget() -> None:
    _streams[:] = [_default]
    _default.queue.clear()
    _default.done = 0
    log.waits.clear()
