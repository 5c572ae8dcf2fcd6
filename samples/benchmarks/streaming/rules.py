"""Policies to compare with: one level for all chunks, text for all, and CacheGen's rule."""

from __future__ import annotations

import math

from kvtool.core.streaming import Fetch, Harmonic, Ladder, Rung, Task
from kvtool.core.streaming.policy import Policy


class Rule(Policy):
    """A rule of what to fetch: it waits for what it asked for, and computes nothing before the pass."""

    def __init__(self, task: Task, estimator: Harmonic) -> None:
        super().__init__(task, estimator)
        self._closed.clear()

    def compute(self, now: float) -> int | None:
        return None

    def give_up_at(self, fetch: Fetch) -> float:
        return self._now if fetch.chunk in self._closed else math.inf


class Fixed(Rule):
    """Every chunk at one level, whatever the link does; a chunk that is not stored at it is computed from its text."""

    def __init__(self, task: Task, estimator: Harmonic, level: str) -> None:
        super().__init__(task, estimator)
        self._wanted = level

    def next(self, now: float) -> Fetch | None:
        self._now = max(self._now, now)
        for ladder in self.task.ladders:
            if ladder.chunk in self._closed:
                continue
            for number, rung in enumerate(ladder.rungs):
                if rung.level == self._wanted and self._reaching[ladder.chunk] < number:
                    return self._ask(now, ladder, number, "base")
        return None


class TextOnly(Rule):
    """Nothing is fetched."""

    def next(self, now: float) -> Fetch | None:
        return None


class CacheGenRule(Rule):
    """CacheGen (arXiv 2310.07240, section 5.3): chunk by chunk, the finest level at which all remaining chunks are
    expected to meet the objective at the last measured rate; text where none does. What has been decided stays.

    The finest level first and text last is the order of the authors' code. The first chunks, before there is an
    estimate, are fetched at the level in the middle.
    """

    def __init__(self, task: Task, estimator: Harmonic) -> None:
        super().__init__(task, estimator)
        self._waiting = [ladder for ladder in task.ladders if ladder.rungs]

    def next(self, now: float) -> Fetch | None:
        self._now = max(self._now, now)
        while self._waiting:
            number = self._choose(now)
            ladder = self._waiting.pop(0)
            if number is not None:
                return self._ask(now, ladder, number, "base")
        return None

    def _choose(self, now: float) -> int | None:
        """The rung of the first waiting chunk; None: its text."""
        rungs = self._waiting[0].rungs
        rate = self._rate
        if rate is None:
            return len(rungs) // 2
        deadline = self.task.objective - self.task.compute(self._texts())
        for number in reversed(range(len(rungs))):
            size = sum(_alike(ladder, rungs[number]).size for ladder in self._waiting)
            if self._arrival(now, size, rate) <= deadline:
                return number
        return None

    def _texts(self) -> frozenset[int]:
        """Chunks that are computed from their text by what has been decided."""
        coming = {one.fetch.chunk for one in self._flying} | {ladder.chunk for ladder in self._waiting}
        return frozenset(chunk for chunk, level in self.levels.items() if level is None) - coming


def _alike(ladder: Ladder, rung: Rung) -> Rung:
    """Return a chunk's rung of the same level; without one the coarsest that loses no more, or its finest."""
    same = (one for one in ladder.rungs if one.level == rung.level)
    fine = (one for one in ladder.rungs if one.loss <= rung.loss)
    return next(same, None) or next(fine, ladder.rungs[-1])
