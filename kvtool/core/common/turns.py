"""A lock whose holder is whoever has waited longest."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Lets threads do something one after the other, in the order in which they asked.

    A plain lock goes to whoever is awake when it is let go of: a thread that takes it again and again keeps it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: deque[object] = deque()  # the first one has the turn

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the turn of this thread, which ends with the block. It is not to be asked for once more inside."""
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
