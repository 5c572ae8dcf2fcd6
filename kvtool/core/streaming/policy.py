"""The adaptive policy: every chunk coarsely first, then finer while there is time.

CacheGen (arXiv 2310.07240, section 5.3) settles a chunk's level before it is fetched, so a link that then slows down
costs the objective. Nested levels allow another order: the coarsest level of all chunks first, which is a complete
context in few bytes, then the differences to the next finer one. What is cut off at the end was an improvement.
"""

from __future__ import annotations

import math

from kvtool.core.streaming.book import Book, Fetch, Policy, Task
from kvtool.core.streaming.estimate import DEFAULT_MARGIN, Estimator
from kvtool.core.streaming.ladder import Ladder

__all__ = ["Adaptive", "Fetch", "Policy", "Task"]

OPTIMISM = 10.0  # how much faster than ever before a link may become: those that were down come back


class Adaptive(Book):
    """Bases, then refinements; text where it is sooner, or where only text is sure to meet the objective.

    - A base is fetched where that is expected to be sooner than computing the chunk, and where it is expected before
      computing everything that is not there yet would no longer meet the objective. At that moment it is given up: so
      the objective is met wherever text alone would have met it.
    - Where text cannot meet the objective in any case, bases are fetched as long as they could still come in time if
      the link became `OPTIMISM` times as fast as it has been. After that only the time counts: a base is fetched where
      that is sooner than computing it, and given up when waiting for it has taken as long. So no link makes it later
      than the objective and twice the text.
    - A refinement is fetched while it is expected to be decoded in time. Each step is taken for all chunks, the most
      relevant first, before the next one: on levels of growing step size the first step gains most for its bytes.
    - Without an objective: every chunk at its finest level, at once.
    """

    def __init__(self, task: Task, estimator: Estimator, margin: float = DEFAULT_MARGIN) -> None:
        super().__init__(task, estimator, margin)
        self._over = False
        self._guarded = False  # computing all that is not there has once been known to meet the objective
        self._best = math.inf  # bytes a second, of all fetches so far
        for ladder in task.ladders:
            if not ladder.rungs or (task.objective is not None and self._slow_to_decode(ladder)):
                self._closed.add(ladder.chunk)
        self._look(0.0)

    def next(self, now: float) -> Fetch | None:
        self._look(now)
        if self._over:
            return None
        if self.task.objective is None:
            return self._everything(now)
        return self._base(now) or self._refinement(now)

    def done(self, fetch: Fetch, started: float, ended: float, arrived: bool) -> None:
        limit = self.give_up_at(fetch)
        in_time = limit is None or ended < limit or fetch.chunk in self._closed
        if not arrived and not in_time and self._is_base(fetch):
            self._over = True  # no time is left for any other either
        if arrived and ended > started:
            rate = fetch.size / (ended - started)
            self._best = rate if math.isinf(self._best) else max(self._best, rate)
        super().done(fetch, started, ended, arrived)
        self._look(ended)

    def give_up_at(self, fetch: Fetch) -> float | None:
        if self.task.objective is None or fetch.chunk in self._closed:
            return super().give_up_at(fetch)
        if self._over:
            return self._now
        # Where the objective is promised, nothing is built on a base that has not arrived: it may still fail.
        deadline = self._deadline(frozenset() if self._guarded else self._bases_flying())
        if not self._is_base(fetch):
            return deadline - self._decode_seconds(fetch)
        return deadline if self._guarded else max(self._last_hope(), self._as_long_as_text(fetch))

    def _look(self, now: float) -> None:
        """Take note of the time."""
        self._now = max(self._now, now)
        if self.task.objective is None:
            return
        in_time = self._now <= self._deadline(frozenset())
        self._over = self._over or (self._guarded and not in_time and not self._flying)
        self._guarded = self._guarded or in_time

    def _everything(self, now: float) -> Fetch | None:
        for ladder in self.task.ladders:
            if ladder.chunk not in self._closed and ladder.rungs[-1].absent(self._coming(ladder)):
                return self._ask(now, ladder, len(ladder.rungs) - 1, "base")
        return None

    def _base(self, now: float) -> Fetch | None:
        for ladder in self.task.ladders:
            open_ = ladder.chunk not in self._closed and self._reaching[ladder.chunk] < 0
            if open_ and self._worth_fetching(now, ladder):
                return self._ask(now, ladder, 0, "base")
        return None

    def _worth_fetching(self, now: float, ladder: Ladder) -> bool:
        flying, rate = self._bases_flying(), self._rate
        deadline = self._deadline(flying)
        if rate is None:
            return now < deadline or not self._guarded
        if not self._guarded and now <= self._last_hope():
            return True
        size = ladder.missing(self._coming(ladder), ladder.rungs[0])
        if size / rate >= self._text_seconds(ladder.chunk, self._missing - flying):
            return False
        return not self._guarded or self._arrival(now, size, rate) <= deadline

    def _refinement(self, now: float) -> Fetch | None:
        rate = self._rate
        if rate is None:
            return None
        deadline = self._deadline(self._bases_flying())
        for number in range(1, max((len(ladder.rungs) for ladder in self.task.ladders), default=0)):
            for ladder in self.task.ladders:
                if ladder.chunk in self._closed or self._reaching[ladder.chunk] != number - 1:
                    continue
                if number < len(ladder.rungs) and self._in_time(now, ladder, number, rate, deadline):
                    return self._ask(now, ladder, number, "refinement")
        return None

    def _in_time(self, now: float, ladder: Ladder, number: int, rate: float, deadline: float) -> bool:
        rung = ladder.rungs[number]
        arrival = self._arrival(now, ladder.missing(self._coming(ladder), rung), rate)
        queued = sum(self._decode_seconds(one.fetch) for one in self._flying)
        ready = max(arrival, self._decoded_at + queued) + self.task.decode(ladder.tokens, rung.level)
        return ready <= deadline

    def _deadline(self, arriving: frozenset[int]) -> float:
        """The latest moment at which computing what is not there meets the objective, if the `arriving` arrive."""
        assert self.task.objective is not None
        return self.task.objective - self.task.compute(self._missing - arriving)

    def _last_hope(self) -> float:
        """The latest moment at which the oldest outstanding base, or the next one, may arrive so that all the others
        could still come in time, on a link that comes back."""
        open_ = [self._ladders[chunk] for chunk in sorted(self._missing - self._closed)]
        first = next((one.fetch for one in self._flying if self._is_base(one.fetch)), None)
        left = sum(ladder.rungs[0].size for ladder in open_) - (first.size if first else 0)
        return self._deadline(frozenset(ladder.chunk for ladder in open_)) - left / (OPTIMISM * self._best)

    def _as_long_as_text(self, fetch: Fetch) -> float:
        """When waiting for the outstanding bases up to this one has taken as long as computing them would."""
        missing, waited = self._missing, 0.0
        for one in self._flying:
            if self._is_base(one.fetch):
                waited += self._text_seconds(one.fetch.chunk, missing)
                missing -= {one.fetch.chunk}
            if one.fetch == fetch:
                break
        return self._busy_since + waited

    def _bases_flying(self) -> frozenset[int]:
        return frozenset(one.fetch.chunk for one in self._flying) & self._missing

    def _is_base(self, fetch: Fetch) -> bool:
        first = next((one.fetch for one in self._flying if one.fetch.chunk == fetch.chunk), None)
        return fetch == first and self._level(fetch.chunk) is None

    def _text_seconds(self, chunk: int, among: frozenset[int]) -> float:
        """What computing a chunk adds to the pass."""
        return self.task.compute(among | {chunk}) - self.task.compute(among - {chunk})

    def _decode_seconds(self, fetch: Fetch) -> float:
        return self.task.decode(self._ladders[fetch.chunk].tokens, fetch.level)

    def _slow_to_decode(self, ladder: Ladder) -> bool:
        decode = self.task.decode(ladder.tokens, ladder.rungs[0].level)
        return decode > self._text_seconds(ladder.chunk, frozenset())
