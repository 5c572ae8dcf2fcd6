"""One state of a store for a whole question, whoever writes meanwhile."""

from __future__ import annotations

import threading

from kvtool.core.cache.environment import Environment, Snapshot
from kvtool.core.cache.gate import Visit
from kvtool.core.errors import KvtoolError


class View:
    """A read transaction that threads share. It ends when its last user leaves: a loader may still read."""

    def __init__(self, environment: Environment, visit: Visit) -> None:
        self.environment = environment
        self.snapshot: Snapshot = environment.snapshot(visit)
        self._visit = visit
        self._users = 1
        self._lock = threading.Lock()

    def enter(self) -> bool:
        """Use it until :meth:`leave`; False: it has ended."""
        with self._lock:
            if not self._users:
                return False
            if not self._visit.inside:
                raise KvtoolError("the store's view was lost while its map changed", "ask again")
            self._users += 1
            return True

    def leave(self) -> None:
        """End the use that :meth:`enter` or making it began."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._visit.end()
