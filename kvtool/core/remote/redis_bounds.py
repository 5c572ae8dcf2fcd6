"""Bounds on a reply of Redis: no more bytes than were asked for, and no slower than a usable line."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis._parsers.hiredis import _HiredisParser
from redis.exceptions import InvalidResponse, TimeoutError

from kvtool.core.remote.limits import LEAST_RATE

_PLAIN = 2**24  # bytes of an answer without a value of ours: 1000 names of a scan, a number, an error
_READ_AHEAD = 2**17  # bytes of the answers behind it, which come with its end


class Bounds(threading.local):
    """The bounds of the next reply that a thread reads: its bytes, and the seconds without data.

    Parameters
    ----------
    timeout : seconds, of each thread.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.most = _PLAIN

    @contextmanager
    def of(self, most: int) -> Iterator[None]:
        """Let answers have so many bytes inside."""
        before, self.most = self.most, max(most, _PLAIN)
        try:
            yield
        finally:
            self.most = before


class BoundedParser(_HiredisParser):
    """hiredis' parser, which gives up an answer that is longer or slower than may be."""

    def __init__(self, socket_read_size: int, bounds: Bounds) -> None:
        super().__init__(socket_read_size)  # type: ignore[no-untyped-call]
        self._bounds = bounds
        self._begun, self._came = 0.0, 0

    def read_response(self, *given: Any, **more: Any) -> Any:
        """Read one answer. Raises InvalidResponse, TimeoutError."""
        self._begun, self._came = time.monotonic(), 0
        return super().read_response(*given, **more)

    def read_from_socket(self, *given: Any, **more: Any) -> Any:
        """Read what has come of it. Raises as `read_response` does."""
        before = self._reader.len()
        done = super().read_from_socket(*given, **more)  # type: ignore[no-untyped-call]
        self._came += self._reader.len() - before
        seconds = time.monotonic() - self._begun
        if self._came > self._bounds.most + _READ_AHEAD:
            raise InvalidResponse("an answer is longer than what was asked for")
        if seconds > self._bounds.timeout and self._came < seconds * LEAST_RATE:
            raise TimeoutError("an answer comes too slowly")
        return done

    def handle_push_response(self, response: Any, **more: Any) -> Any:
        """Refuse what nobody has asked for: nothing is subscribed to."""
        raise InvalidResponse("it sends what nobody has asked for")
