"""The policy of fetches and of computing: every chunk coarsely first, then finer while there is time; meanwhile the
processor computes from the other end.

CacheGen (arXiv 2310.07240, section 5.3) settles a chunk's level before it is fetched, so a link that then slows down
costs the objective. Here the coarsest level of all chunks comes first; what is cut off at the end was an improvement.
As in Cake (arXiv 2410.03065, section 4) the processor is not idle while the link fetches, but kvtool's chunks do not
depend on each other: the link begins with the most relevant chunk, the processor with the least relevant one. A
computed chunk is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvtool.core.streaming.fetch_state import DEFAULT_MARGIN, Estimator, Fetch, Harmonic, Ladder, Policy, Task, text_row

DEPTH = 2  # fetches outstanding at once
OPTIMISM = 10.0  # how much faster than ever before a link may become: those that were down come back
MEANWHILE = "text, computed meanwhile"
AS_LONG_AGAIN = 2  # what is overdue is expected to take as long again as it has
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Running:
    chunk: int
    since: float
    end: float
    decoded: float


class OverlapPolicy(Policy):
    """Policy of bases, then refinements; text where it is sooner, or where only text is sure to meet the objective.

    The link:

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

    The processor, where `Task.alone` lets it compute a chunk:

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
        self._over = False
        self._best = math.inf  # bytes a second, of all fetches so far
        self._speed = Harmonic()  # of computing: what was expected over what it took
        self._running: _Running | None = None
        self._computed: set[int] = set()
        self._refused: set[int] = set()  # whose computation ended too soon: it is not begun again
        self._decoding = 0.0  # seconds, of all that has come
        for ladder in task.ladders:
            slow = ladder.rungs and task.decode(ladder.tokens, ladder.rungs[0].level) > self._text_seconds(
                ladder.chunk, _NONE
            )
            if not ladder.rungs or (task.objective is not None and slow):
                self._closed.add(ladder.chunk)
        self._promised = task.objective is not None and self._deadline(_NONE) >= 0

    @property
    def computed(self) -> frozenset[int]:
        return frozenset(self._computed)

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
        if arrived:
            self._decoding += self.task.decode(self._ladders[fetch.chunk].tokens, fetch.level)

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
        """If only time counts, also for what arrives before the processor has computed all others."""
        if ladder.rungs[0].size / rate < self._text_seconds(ladder.chunk, self._missing - self._bases_flying()):
            return True
        through = self._through(self._missing - self._chunks_flying)
        in_time = self._arrival(now, ladder.rungs[0].size, rate) < through
        return in_time and not self._promised and math.isfinite(through)

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

    # ---- what to compute ---------------------------------------------------------------------------------------------

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

    # ---- chunks ------------------------------------------------------------------------------------------------------

    def _open(self) -> list[Ladder]:
        return [self._ladders[chunk] for chunk in self._missing - self._closed]

    def _to_come(self) -> list[Ladder]:
        meanwhile = self._meanwhile(self._all_by())
        return [ladder for ladder in self._open() if ladder.chunk not in meanwhile]

    def _open_decode(self) -> float:
        return sum(self.task.decode(ladder.tokens, ladder.rungs[0].level) for ladder in self._to_come())

    def _bases_flying(self) -> frozenset[int]:
        return self._chunks_flying & self._missing

    def _is_base(self, fetch: Fetch) -> bool:
        first = next((flight.fetch for flight in self._flying if flight.fetch.chunk == fetch.chunk), None)
        return fetch == first and fetch.chunk in self._missing
