"""The adaptive policy: every chunk coarsely first, then finer while there is time.

CacheGen (arXiv 2310.07240, section 5.3) settles a chunk's level before it is fetched, so a link that then slows down
costs the objective. Here the coarsest level of all chunks comes first; what is cut off at the end was an improvement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtool.core.streaming.fetch_state import DEFAULT_MARGIN, Estimator, Fetch, Ladder, Policy, Task

DEPTH = 2  # fetches outstanding at once
OPTIMISM = 10.0  # how much faster than ever before a link may become: those that were down come back
_NONE: frozenset[int] = frozenset()


class Adaptive(Policy):
    """Policy of bases, then refinements; text where it is sooner, or where only text is sure to meet the objective.

    - Where computing all from text meets the objective, that is promised: a base is fetched where it is expected sooner
      than computing the chunk, and given up at the last moment at which computing all that is not there is in time.
    - Where it would not, the link is hoped for: bases are fetched while they could all come in time if it became
      `OPTIMISM` times as fast as it has been. Should text come into reach on the way, it is taken at the last moment as
      above, unless the link is on course and the base is expected soon after that moment. After the last hope only the
      time counts: a base is fetched where that is sooner than computing it, and given up when waiting for it has taken
      as long. So no link makes it later than the objective and twice the text.
    - A refinement is fetched while it is expected to be decoded in time, and given up after that. Each step is taken
      for all chunks, the most relevant first, before the next one: where the steps of the levels grow, the first one
      gains most for its bytes.
    - Without an objective: every chunk at its finest level, at once.
    """

    def __init__(self, task: Task, estimator: Estimator, margin: float = DEFAULT_MARGIN) -> None:
        super().__init__(task, estimator, margin)
        self._over = False
        self._best = math.inf  # bytes a second, of all fetches so far
        for ladder in task.ladders:
            slow = ladder.rungs and task.decode(ladder.tokens, ladder.rungs[0].level) > self._text_seconds(
                ladder.chunk, _NONE
            )
            if not ladder.rungs or (task.objective is not None and slow):
                self._closed.add(ladder.chunk)
        self._promised = task.objective is not None and self._deadline(_NONE) >= 0

    def next(self, now: float) -> Fetch | None:
        self._now = max(self._now, now)
        if self.task.objective is None:
            return self._everything(now)
        if self._promised and not self._flying and now > self._deadline(_NONE):
            self._over = True
        return None if self._over else self._base(now) or self._refinement(now)

    def done(self, fetch: Fetch, started: float, ended: float, arrived: bool) -> None:
        limit = self.give_up_at(fetch)
        given_up = not arrived and limit is not None and ended >= limit
        if given_up and self._is_base(fetch) and fetch.chunk not in self._closed:
            self._over = True  # no time is left for any other either
        if arrived and ended > started:
            rate = fetch.size / (ended - started)
            self._best = rate if math.isinf(self._best) else max(self._best, rate)
        super().done(fetch, started, ended, arrived)

    def give_up_at(self, fetch: Fetch) -> float | None:
        if self.task.objective is None or fetch.chunk in self._closed:
            return super().give_up_at(fetch)
        if self._over:
            return self._now
        if not self._is_base(fetch):
            # Where the objective is promised, nothing is built on a base that has not arrived: it may still fail.
            arriving = _NONE if self._promised else self._bases_flying()
            latest = self._deadline(arriving) - self.task.decode(self._ladders[fetch.chunk].tokens, fetch.level)
            return latest if self._decoded_at <= latest else self._now
        text = self._deadline(_NONE)
        in_reach = max(self._now, self._decoded_at) <= text
        if self._promised or (in_reach and self._course(fetch) <= text):
            return text
        return max(self._last_hope(), self._as_long_as_text(fetch))

    # ---- what to fetch -----------------------------------------------------------------------------------------------

    def _order(self) -> Sequence[Ladder]:
        return self.task.ladders

    def _everything(self, now: float) -> Fetch | None:
        for ladder in self._order():
            if ladder.chunk not in self._closed and self._reaching[ladder.chunk] < len(ladder.rungs) - 1:
                return self._ask(now, ladder, len(ladder.rungs) - 1, "base")
        return None

    def _base(self, now: float) -> Fetch | None:
        for ladder in self._order():
            open_ = ladder.chunk not in self._closed and self._reaching[ladder.chunk] < 0
            if open_ and self._worth_fetching(now, ladder):
                return self._ask(now, ladder, 0, "base")
        return None

    def _worth_fetching(self, now: float, ladder: Ladder) -> bool:
        flying, rate = self._bases_flying(), self._rate
        deadline = self._deadline(flying)
        if rate is None:
            return now < deadline or not self._promised
        size = ladder.rungs[0].size
        sooner = self._sooner(now, ladder, rate)
        if not self._promised and max(now, self._decoded_at) > deadline:
            return sooner or now <= self._last_hope()
        in_time = sooner and self._arrival(now, size, rate) <= deadline
        return in_time or (not self._promised and self._on_course(now, rate))

    def _sooner(self, now: float, ladder: Ladder, rate: float) -> bool:
        return ladder.rungs[0].size / rate < self._text_seconds(ladder.chunk, self._missing - self._bases_flying())

    def _refinement(self, now: float) -> Fetch | None:
        # Nothing is known of the link where all bases were here from the start: one refinement finds out.
        rate = math.inf if self._rate is None and not self._flying else self._rate
        if rate is None:
            return None
        deadline = self._deadline(self._bases_flying())
        for number in range(1, max((len(ladder.rungs) for ladder in self.task.ladders), default=0)):
            for ladder in self._order():
                if ladder.chunk in self._closed or self._reaching[ladder.chunk] != number - 1:
                    continue
                if number < len(ladder.rungs) and self._in_time(now, ladder, number, rate, deadline):
                    return self._ask(now, ladder, number, "refinement")
        return None

    def _in_time(self, now: float, ladder: Ladder, number: int, rate: float, deadline: float) -> bool:
        rung, decode = ladder.rungs[number], self.task.decode
        arrival = self._arrival(now, ladder.missing(self._coming(ladder), rung), rate)
        queued = sum(decode(self._ladders[flight.fetch.chunk].tokens, flight.fetch.level) for flight in self._flying)
        return max(arrival, self._decoded_at + queued) + decode(ladder.tokens, rung.level) <= deadline

    # ---- times -------------------------------------------------------------------------------------------------------

    def _deadline(self, arriving: frozenset[int]) -> float:
        """The latest moment at which computing what neither is there nor `arriving` meets the objective."""
        assert self.task.objective is not None
        return self.task.objective - self.task.compute(self._missing - arriving)

    def _all_by(self) -> float:
        return self._deadline(frozenset(ladder.chunk for ladder in self._open()))

    def _last_hope(self) -> float:
        """When the oldest outstanding base, or the next one, must arrive so that all others could still come in time,
        on a link that comes back."""
        first = next((flight.fetch.size for flight in self._flying if self._is_base(flight.fetch)), 0)
        left = sum(ladder.rungs[0].size for ladder in self._to_come()) - first
        return self._all_by() - max(left / (OPTIMISM * self._best), self._open_decode())

    def _on_course(self, now: float, rate: float) -> bool:
        left = sum(ladder.rungs[0].size for ladder in self._to_come() if self._reaching[ladder.chunk] < 0)
        decoded = max(now, self._decoded_at) + self._open_decode()
        return max(self._arrival(now, left, rate), decoded) <= self._all_by()

    def _course(self, fetch: Fetch) -> float:
        rate = self._rate
        if rate is None or not self._on_course(self._now, rate):
            return -math.inf
        ahead = [flight.fetch for flight in self._flying]
        waiting = sum(flight.size for flight in ahead[: ahead.index(fetch) + 1])
        return self._busy_since + waiting / rate

    def _as_long_as_text(self, fetch: Fetch) -> float:
        """When waiting for the outstanding bases up to this one has taken as long as computing them would."""
        missing, waited = self._missing, 0.0
        for flight in self._flying:
            if self._is_base(flight.fetch):
                waited += self._text_seconds(flight.fetch.chunk, missing)
                missing -= {flight.fetch.chunk}
            if flight.fetch == fetch:
                break
        return self._busy_since + waited

    def _text_seconds(self, chunk: int, among: frozenset[int]) -> float:
        return self.task.compute(among | {chunk}) - self.task.compute(among - {chunk})

    # ---- chunks ------------------------------------------------------------------------------------------------------

    def _open(self) -> list[Ladder]:
        return [self._ladders[chunk] for chunk in self._missing - self._closed]

    def _to_come(self) -> list[Ladder]:
        return self._open()

    def _open_decode(self) -> float:
        return sum(self.task.decode(ladder.tokens, ladder.rungs[0].level) for ladder in self._to_come())

    def _bases_flying(self) -> frozenset[int]:
        return self._chunks_flying & self._missing

    def _is_base(self, fetch: Fetch) -> bool:
        first = next((flight.fetch for flight in self._flying if flight.fetch.chunk == fetch.chunk), None)
        return fetch == first and fetch.chunk in self._missing
