"""Many transactions, or one change of the map: LMDB moves the map under running transactions."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeAlias

import lmdb

from kvtool.core.cache.tree import Tree

Transaction: TypeAlias = "lmdb.Transaction[memoryview]"
_LOOK_SECONDS = 0.001


class Visit:
    """A transaction's stay in an environment: created first, ended in a `finally`; ending it twice is allowed.

    Its state is one attribute, so that ending is a single assignment, which no signal can interrupt halfway.
    """

    __slots__ = ("__weakref__", "gate", "inside", "thread", "transaction", "tree")

    def __init__(self) -> None:
        self.gate: Gate | None = None
        self.inside = False
        self.thread = 0
        self.transaction: Transaction | None = None
        self.tree: Tree | None = None

    def end(self) -> None:
        """End the transaction, if it was begun, and leave."""
        try:
            if self.transaction is not None:
                self.transaction.abort()
        finally:
            self.inside = False
            self.transaction = None
            if self.gate is not None:
                self.gate.left(self)


class Gate:
    """Lets visits in, or one thread that must be alone.

    Who waits to be alone keeps new threads out, else readers in a loop would starve it; a thread that is inside may
    enter again, else it would wait for itself. The gate knows its visits weakly, and a thread that wants to be alone
    ends its own: an interrupt between the lines may have left one behind, and nobody waits for that one for ever.
    Waiting is rare and looks now and then: a plain lock, unlike a condition, cannot be left held by an interrupt.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._visits: dict[int, weakref.ref[Visit]] = {}
        self._waiting: set[object] = set()

    def enter(self, visit: Visit) -> None:
        """Wait until nobody is or wants to be alone, then let the visit in."""
        visit.gate, visit.thread = self, threading.get_ident()
        while True:
            with self._lock:
                if not self._waiting or any(other.thread == visit.thread for other in self._inside()):
                    self._visits[id(visit)] = weakref.ref(visit)
                    visit.inside = True
                    return
            time.sleep(_LOOK_SECONDS)

    def left(self, visit: Visit) -> None:
        """Forget a visit that has ended."""
        self._visits.pop(id(visit), None)

    def alone(self, work: Callable[[], None]) -> None:
        """Do something while nobody is inside and nobody enters."""
        ticket = object()
        try:
            self._waiting.add(ticket)
            while True:
                with self._lock:
                    if not self._others():
                        work()
                        return
                time.sleep(_LOOK_SECONDS)
        finally:
            self._waiting.discard(ticket)

    def _inside(self) -> list[Visit]:
        known = [reference() for reference in list(self._visits.values())]
        return [visit for visit in known if visit is not None and visit.inside]

    def _others(self) -> bool:
        """Return True if other threads are inside; visits that this thread has left open are ended."""
        this_thread = threading.get_ident()
        for visit in self._inside():
            if visit.thread == this_thread:
                visit.end()
        return bool(self._inside())
