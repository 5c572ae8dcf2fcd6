"""Turns of threads at a model."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A fair (first in, first out) lock, for one turn at a time: a thread that retakes a plain lock would keep it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: deque[object] = deque()  # the first one has the turn

    @contextmanager
    def turn(self) -> Iterator[None]:
        me = object()
        with self._changed:
            self._asked.append(me)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._asked[0] is me)
            yield
        finally:
            with self._changed:
                self._asked.remove(me)
                self._changed.notify_all()
