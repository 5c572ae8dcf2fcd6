"""Pools of actors for tests: one whose first worker is killed, and one that is in this process and can be stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import kvtool
from kvtool.core.crew.actor_pool import ActorPool, Worker, serialize

WORKERS = ("--ray", "local", "--ray-workers", "2")


def killing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kill the first worker before the first result of its work is taken; lists the killed ones."""
    killed: list[int] = []
    plain = ActorPool.next

    def take(self: ActorPool) -> Any:
        if hasattr(self, "facts") and not killed:
            killed.append(self.facts[0].pid)
            os.kill(killed[0], signal.SIGKILL)
        return plain(self)

    monkeypatch.setattr(ActorPool, "next", take)
    return killed


class Backwards:
    """A pool in this process, of which the last piece of work is done first; Ctrl-C comes after so many."""

    size = 2

    def __init__(self, make: Callable[[Any], Any], recipe: Any, most: int) -> None:
        self._worker, self._most = Worker(kvtool.__version__, serialize((make, recipe)), 0), most
        self._under_way: list[tuple[str, Any, tuple[Any, ...]]] = []
        self.facts = [self._worker.do("facts", serialize(())) for _ in range(self.size)]
        self.is_closed = False

    @property
    def is_full(self) -> bool:
        return len(self._under_way) == 3

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def submit(self, what: str, key: Any, *given: Any) -> None:
        self._under_way.append((what, key, given))

    def next(self) -> tuple[Any, Any]:
        if not self._most:
            raise KeyboardInterrupt
        self._most -= 1
        what, key, given = self._under_way.pop()
        return key, self._worker.do(what, serialize(given))

    def close(self) -> None:
        self.is_closed = True


def backwards(monkeypatch: pytest.MonkeyPatch, where: str, most: int) -> list[Backwards]:
    """Have a module of a job take such pools; lists them."""
    crews: list[Backwards] = []

    def crew(options: object, make: Callable[[Any], Any], recipe: Any, **more: object) -> Backwards:
        crews.append(Backwards(make, recipe, most))
        return crews[-1]

    monkeypatch.setattr(f"{where}.ActorPool", crew)
    return crews
