"""Crews for tests: one whose first worker is killed, and one that is in this process and can be stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import kvtool
from kvtool.core.crew.crew import Crew
from kvtool.core.crew.parcel import packed
from kvtool.core.crew.worker import Worker

WORKERS = ("--ray", "local", "--ray-workers", "2")


def killing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kill the first worker before the first result of its work is taken; lists who was killed."""
    killed: list[int] = []
    plain = Crew.next

    def take(self: Crew) -> Any:
        if hasattr(self, "facts") and not killed:
            killed.append(self.facts[0].pid)
            os.kill(killed[0], signal.SIGKILL)
        return plain(self)

    monkeypatch.setattr(Crew, "next", take)
    return killed


class Backwards:
    """A crew in this process, of which the last piece of work is done first; Ctrl-C comes after so many."""

    size = 2

    def __init__(self, make: Callable[[Any], Any], recipe: Any, most: int) -> None:
        self._worker, self._most = Worker(kvtool.__version__, packed((make, recipe)), 0), most
        self._under_way: list[tuple[str, Any, tuple[Any, ...]]] = []
        self.facts = [self._worker.do("facts", packed(())) for _ in range(self.size)]
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
        return key, self._worker.do(what, packed(given))

    def close(self) -> None:
        self.is_closed = True


def backwards(monkeypatch: pytest.MonkeyPatch, where: str, most: int) -> list[Backwards]:
    """Have a module of a job take such crews; lists them."""
    crews: list[Backwards] = []

    def crew(options: object, make: Callable[[Any], Any], recipe: Any, **more: object) -> Backwards:
        crews.append(Backwards(make, recipe, most))
        return crews[-1]

    monkeypatch.setattr(f"{where}.Crew", crew)
    return crews
