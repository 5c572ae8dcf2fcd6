"""The adaptive policy with a processor that is not idle while the link fetches: it computes from the other end.

As Cake does (arXiv 2410.03065, section 4), but kvtool's chunks do not depend on each other: the link begins with the
most relevant chunk, the processor with the least relevant one. A computed chunk is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvtool.core.streaming.fetch_state import DEFAULT_MARGIN, Estimator, Fetch, Harmonic, Ladder, Task, text_row
from kvtool.core.streaming.policy import Adaptive

MEANWHILE = "text, computed meanwhile"
AS_LONG_AGAIN = 2  # what is overdue is expected to take as long again as it has


@dataclass(frozen=True, slots=True)
class _Running:
    chunk: int
    since: float
    end: float
    decoded: float


class OverlapPolicy(Adaptive):
    """Policy that fetches as `Adaptive` does, and computes chunks meanwhile.

    - With an objective: the processor works until then. Chunks that are missing come first, then those held at a lossy
      level. Nothing is begun that is not expected in time, or that the link is expected to bring sooner without a loss.
      Where computing all from text would meet the objective, it is stopped when only the pass over all that is missing
      is sure to be in time: so a processor that is slower than expected costs nothing.
    - Without one: until all is there. A chunk is computed where the link is expected to bring it later than that. A
      link that is overdue is expected to take as long again, so that a stalled one costs little.
    - What the link was asked for is computed only where it is expected later: of the two the later one is given up.
    """

    def __init__(self, task: Task, estimator: Estimator, margin: float = DEFAULT_MARGIN) -> None:
        super().__init__(task, estimator, margin)
        self._speed = Harmonic()  # of computing: what was expected over what it took
        self._running: _Running | None = None
        self._computed: set[int] = set()
        self._refused: set[int] = set()  # whose computation ended too soon: it is not begun again
        self._decoding = 0.0  # seconds, of all that has come

    @property
    def computed(self) -> frozenset[int]:
        return frozenset(self._computed)

    def done(self, fetch: Fetch, started: float, ended: float, arrived: bool) -> None:
        super().done(fetch, started, ended, arrived)
        if arrived:
            self._decoding += self.task.decode(self._ladders[fetch.chunk].tokens, fetch.level)

    # ---- the processor -----------------------------------------------------------------------------------------------

    def compute(self, now: float) -> int | None:
        self._now = max(self._now, now)
        if self._running is not None or self._over:
            return None
        free = max(now, self._decoded_at)
        for chunk in self._texts():
            end = free + self._seconds(chunk)
            if math.isfinite(end) and self._worth_computing(now, chunk, end):
                self._running = _Running(chunk, free, end, self._decoding)
                return chunk
        return None

    def ended(self, chunk: int, seconds: float, now: float, whole: bool) -> None:
        self._now = max(self._now, now)
        self._running = None
        if whole:
            self._speed.observe(self.task.alone(chunk), seconds)
            self._computed.add(chunk)
            self._closed.add(chunk)
            self._missing -= {chunk}
        else:
            self._refused.add(chunk)
        row = text_row(chunk, MEANWHILE if whole else f"gave up computing: {self._level(chunk) or 'text'} stands")
        self._log.append(row | {"compute_ms": seconds * 1e3})

    def stop_at(self, chunk: int) -> float | None:
        if self.task.objective is not None and (self._promised or chunk not in self._missing):
            return self._deadline(self._sure())
        if chunk not in self._missing:
            return self._now
        if self._flying or self._end_of_running() - self._now <= self._text_seconds(chunk, self._missing):
            return None
        return self._now  # the pass computes it sooner

    def _worth_computing(self, now: float, chunk: int, end: float) -> bool:
        if not self._in_time_computed(chunk, end):
            return False
        if chunk not in self._missing:
            return True
        if not self._flying:
            return False  # streaming is over, and one pass over all that is missing is sooner
        comes_exact = not self._ladders[chunk].loses or self.task.objective is None or chunk in self._chunks_flying
        return not comes_exact or end < self._expected(now, chunk)

    def _in_time_computed(self, chunk: int, end: float) -> bool:
        if self.task.objective is None:
            return True
        if self._promised or chunk not in self._missing:
            return end <= self._deadline(self._sure())
        return end <= self._all_by() or end < self._expected(self._now, chunk)

    def _texts(self) -> Iterator[int]:
        """Chunks that may be computed: what is missing and not under way, then what is, then what loses something."""
        rest = [ladder.chunk for ladder in reversed(self.task.ladders) if self._may_compute(ladder)]
        flying = self._chunks_flying
        yield from sorted(rest, key=lambda chunk: 2 if chunk not in self._missing else int(chunk in flying))

    def _may_compute(self, ladder: Ladder) -> bool:
        if ladder.chunk in self._computed or ladder.chunk in self._refused:
            return False
        reached = self._reached[ladder.chunk]
        return reached < 0 or (self.task.objective is not None and ladder.rungs[reached].loss > 0)

    # ---- both of them ------------------------------------------------------------------------------------------------

    def _order(self) -> list[Ladder]:
        """By relevance; the running chunk last, and only if the link is expected to be sooner."""
        running = self._running
        order = [ladder for ladder in self.task.ladders if running is None or ladder.chunk != running.chunk]
        if running is not None and running.chunk in self._missing:
            rate, ladder = self._rate, self._ladders[running.chunk]
            size = 0 if not ladder.rungs else ladder.rungs[0 if self.task.objective is not None else -1].size
            if rate is not None and size and self._arrival(self._now, size, rate) < self._end_of_running():
                order.append(ladder)
        return order

    def _sooner(self, now: float, ladder: Ladder, rate: float) -> bool:
        """If only time counts, also for what arrives before the processor has computed all others."""
        if super()._sooner(now, ladder, rate):
            return True
        through = self._through(self._missing - self._chunks_flying)
        in_time = self._arrival(now, ladder.rungs[0].size, rate) < through
        return in_time and not self._promised and math.isfinite(through)

    def _to_come(self) -> list[Ladder]:
        meanwhile = self._meanwhile(self._all_by())
        return [ladder for ladder in self._open() if ladder.chunk not in meanwhile]

    def _meanwhile(self, until: float) -> set[int]:
        """Chunks neither there nor requested that are expected to be computed by then."""
        found: set[int] = set()
        free = self._free()
        if self._running is not None and free <= until:
            found.add(self._running.chunk)
        for chunk in self._texts():
            if chunk in self._missing - self._chunks_flying - found:
                free += self._seconds(chunk)
                if free > until:
                    break
                found.add(chunk)
        return found

    def _through(self, chunks: frozenset[int]) -> float:
        rest = chunks - self._refused - ({self._running.chunk} if self._running is not None else set())
        return self._free() + sum(self._seconds(chunk) for chunk in rest)

    # ---- times -------------------------------------------------------------------------------------------------------

    def _sure(self) -> frozenset[int]:
        return frozenset() if self._promised else self._bases_flying()

    def _seconds(self, chunk: int) -> float:
        speed = (self._speed.bytes_per_second or 1.0) * (1 - self._margin)
        if self._running is not None and self._running.chunk != chunk:  # it may be overdue already
            took = self._end_of_running() - self._running.since - (self._decoding - self._running.decoded)
            speed = min(speed, self.task.alone(self._running.chunk) / took if took > 0 else speed)
        return self.task.alone(chunk) / speed

    def _free(self) -> float:
        return max(self._now, self._decoded_at) if self._running is None else self._end_of_running()

    def _end_of_running(self) -> float:
        assert self._running is not None
        begun = self._running.since + self._decoding - self._running.decoded
        end = begun + self._running.end - self._running.since
        return end if self._now <= end else begun + AS_LONG_AGAIN * (self._now - begun)

    def _expected(self, now: float, chunk: int) -> float:
        ladder, pace = self._ladders[chunk], self._pace(now)
        if chunk in self._closed or not ladder.rungs or pace is None:
            return math.inf
        size = 0
        for flight in self._flying:
            size += flight.fetch.size
            if flight.fetch.chunk == chunk:
                return self._busy_since + size / pace
        for other in self._order():
            if other.chunk not in self._closed and self._reaching[other.chunk] < 0:
                size += other.rungs[-1 if self.task.objective is None else 0].size
            if other.chunk == chunk:
                break
        return (self._busy_since if self._flying else now) + size / pace

    def _pace(self, now: float) -> float | None:
        rate = self._rate
        if not self._flying:
            return rate
        waited, size = now - self._busy_since, max(self._flying[0].fetch.size, 1)
        if waited <= (0 if rate is None else size / rate):
            return math.inf if rate is None else rate
        return size / (AS_LONG_AGAIN * waited)
