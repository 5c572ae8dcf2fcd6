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
from typing import Any

from kvtool.core.streaming import Fetch, Flight, Harmonic, Ladder, Task, decision_row, mbps

DEPTH = 2  # fetches outstanding at once
MARGIN = 0.1  # of an estimated throughput that is not counted on
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


class Policy:
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

    The processor, where `Task.alone` lets it compute a chunk:

    - It works until the objective. Chunks that are missing come first, then those held at a lossy level. Nothing is
      begun that is not expected in time, or that the link is expected to bring sooner without a loss. Where computing
      all from text would meet the objective, it is stopped when only the pass over all that is missing is sure to be in
      time: so a processor that is slower than expected costs nothing.
    - What the link was asked for is computed only where it is expected later: of the two the later one is given up. A
      link that is overdue is expected to take as long again, so that a stalled one costs little.

    A driver (query/streaming.py over a network, or a simulator) keeps to this order:

    1. While fewer than `DEPTH` fetches are outstanding: `next(now)`. Send what it returns; None: nothing to ask for
       now, something may be later if a fetch is outstanding.
    2. While nothing is computed: `compute(now)`. Begin what it returns; what has come is decoded before.
    3. With nothing outstanding and nothing computed after that, streaming is over: compute the chunks of level None
       that are not among `computed` from their text, in the pass.
    4. Wait until a fetch arrives or fails, or its `give_up_at` comes, or the computation ends, or its `stop_at` comes
       (both may change with every report); report that by `done` or `ended` and go to 1. Ask `compute` now and then
       where none of these comes: what a link is expected to do changes while it does nothing.
    """

    def __init__(self, task: Task, estimator: Harmonic) -> None:
        self.task, self._estimator = task, estimator
        self._ladders = {ladder.chunk: ladder for ladder in task.ladders}
        self._held: dict[int, set[str]] = {chunk: set() for chunk in self._ladders}
        self._reached = dict.fromkeys(self._ladders, -1)  # the rung at which a chunk is held
        self._reaching = dict.fromkeys(self._ladders, -1)  # the same once all that is under way has arrived
        self._missing = frozenset(self._ladders)  # chunks held at no rung
        self._flying: list[Flight] = []
        self._now = self._last_end = 0.0
        self._decoded_at = 0.0  # when all that is there will be decoded
        self._log: list[dict[str, Any]] = []
        self._over = False
        self._best = math.inf  # bytes a second, of all fetches so far
        self._speed = Harmonic()  # of computing: what was expected over what it took
        self._running: _Running | None = None
        self._computed: set[int] = set()
        self._refused: set[int] = set()  # whose computation ended too soon: it is not begun again
        self._decoding = 0.0  # seconds, of all that has come
        self._closed = {ladder.chunk for ladder in task.ladders if self._is_text_sooner(ladder)}  # are not asked for
        self._promised = self._deadline(_NONE) >= 0

    def _is_text_sooner(self, ladder: Ladder) -> bool:
        """Return True for a chunk that is not stored, or takes longer to decode than to compute."""
        text = self._text_seconds(ladder.chunk, _NONE)
        return not ladder.rungs or self.task.decode(ladder.tokens, ladder.rungs[0].level) > text

    @property
    def computed(self) -> frozenset[int]:
        return frozenset(self._computed)

    @property
    def levels(self) -> dict[int, str | None]:
        """The level that each chunk has been fetched at; None: its text is all there is."""
        return {chunk: self._level(chunk) for chunk in self._ladders}

    @property
    def log(self) -> list[dict[str, Any]]:
        """Decisions in the order in which they ended, last the chunks that were never fetched."""
        told = {row["chunk"] for row in self._log} | {flight.fetch.chunk for flight in self._flying}
        return self._log + [decision_row(chunk, "text") for chunk in self._ladders if chunk not in told]

    def next(self, now: float) -> Fetch | None:
        """The fetch to start now, `now` seconds after the question's start."""
        self._now = max(self._now, now)
        if self._promised and not self._flying and now > self._deadline(_NONE):
            self._over = True
        return None if self._over else self._base(now) or self._refinement(now)

    def done(self, fetch: Fetch, started: float, ended: float, arrived: bool) -> None:
        """Note the end of a fetch, which started after the one before it on the same link. Not `arrived`: it failed, or
        was given up."""
        if not arrived and ended >= self.give_up_at(fetch) and self._is_base(fetch) and fetch.chunk not in self._closed:
            self._over = True  # no time is left for any other either
        flight = next(flight for flight in self._flying if flight.fetch == fetch)
        self._flying.remove(flight)
        self._now = self._last_end = max(self._now, ended)
        rate = fetch.size / (ended - started) if arrived and ended > started else None
        decision = flight.decision
        if arrived:
            self._held[fetch.chunk] |= {part.level for part in fetch.parts}
            self._count(fetch.chunk)
            decode = self.task.decode(self._ladders[fetch.chunk].tokens, fetch.level)
            self._decoding += decode
            self._decoded_at = max(self._decoded_at, ended) + decode
            self._estimator.observe(fetch.size, ended - started)
        else:
            self._closed.add(fetch.chunk)
            self._count(fetch.chunk)
            decision = f"gave up {decision}: {self._level(fetch.chunk) or 'text'} stands"
        if rate is not None:
            self._best = rate if math.isinf(self._best) else max(self._best, rate)
        row = decision_row(fetch.chunk, decision, level=fetch.level, fetch_ms=(ended - started) * 1e3)
        row |= {"estimated_mbps": mbps(fetch.estimated_bytes_per_second), "measured_mbps": mbps(rate)}
        self._log.append(row | {"bytes": fetch.size if arrived else 0})

    def give_up_at(self, fetch: Fetch) -> float:
        """When waiting for a fetch should end; at once if what it refines is lost or was computed."""
        if self._over or fetch.chunk in self._closed:
            return self._now
        if not self._is_base(fetch):
            latest = self._sure_deadline() - self.task.decode(self._ladders[fetch.chunk].tokens, fetch.level)
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
            size = ladder.rungs[0].size if ladder.rungs else 0
            if rate is not None and size and self._arrival(self._now, size, rate) < self._end_of_running():
                order.append(ladder)
        return order

    def _base(self, now: float) -> Fetch | None:
        for ladder in self._order():
            is_open = ladder.chunk not in self._closed and self._reaching[ladder.chunk] < 0
            if is_open and self._worth_fetching(now, ladder):
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
        running = set() if self._running is None else {self._running.chunk}
        rest = self._missing - self._chunks_flying - self._refused - running
        through = self._free() + sum(map(self._seconds, rest))
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
        arrival = self._arrival(now, sum(part.size for part in rung.absent(self._coming(ladder))), rate)
        queued = sum(decode(self._ladders[flight.fetch.chunk].tokens, flight.fetch.level) for flight in self._flying)
        return max(arrival, self._decoded_at + queued) + decode(ladder.tokens, rung.level) <= deadline

    # ---- what to compute ---------------------------------------------------------------------------------------------

    def compute(self, now: float) -> int | None:
        """The chunk whose text to compute now, without other chunks; None: none for now."""
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
        """Note the end of a chunk's computation, in seconds without decoding. Not `whole`: it failed, or was
        stopped."""
        self._now = max(self._now, now)
        self._running = None
        if whole:
            self._speed.observe(self.task.alone(chunk), seconds)
            self._computed.add(chunk)
            self._closed.add(chunk)
            self._missing -= {chunk}
        else:
            self._refused.add(chunk)
        decision = MEANWHILE if whole else f"gave up computing: {self._level(chunk) or 'text'} stands"
        self._log.append(decision_row(chunk, decision, compute_ms=seconds * 1e3))

    def stop_at(self, chunk: int) -> float:
        """When waiting for a chunk's computation should end."""
        if self._promised or chunk not in self._missing:
            return self._sure_deadline()
        if self._flying or self._end_of_running() - self._now <= self._text_seconds(chunk, self._missing):
            return math.inf
        return self._now  # the pass computes it sooner

    def _worth_computing(self, now: float, chunk: int, end: float) -> bool:
        in_time, sooner = end <= self._sure_deadline(), end < self._expected(now, chunk)
        if chunk not in self._missing:
            return in_time
        if not self._flying or not (in_time if self._promised else sooner or end <= self._all_by()):
            return False  # without fetches streaming is over, and one pass over all that is missing is sooner
        rungs = self._ladders[chunk].rungs
        return sooner or (bool(rungs) and rungs[0].loss > 0 and chunk not in self._chunks_flying)

    def _texts(self) -> Iterator[int]:
        """Chunks that may be computed: what is missing and not under way, then what is, then what loses something."""
        rest = [ladder.chunk for ladder in reversed(self.task.ladders) if self._may_compute(ladder)]
        flying = self._chunks_flying
        yield from sorted(rest, key=lambda chunk: 2 if chunk not in self._missing else int(chunk in flying))

    def _may_compute(self, ladder: Ladder) -> bool:
        if ladder.chunk in self._computed or ladder.chunk in self._refused:
            return False
        reached = self._reached[ladder.chunk]
        return reached < 0 or ladder.rungs[reached].loss > 0

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

    # ---- times -------------------------------------------------------------------------------------------------------

    def _deadline(self, arriving: frozenset[int]) -> float:
        """The latest moment at which computing what neither is there nor `arriving` meets the objective."""
        return self.task.objective - self.task.compute(self._missing - arriving)

    def _sure_deadline(self) -> float:
        """Where the objective is promised, nothing is built on a base that has not arrived: it may still fail."""
        return self._deadline(_NONE if self._promised else self._bases_flying())

    def _all_by(self) -> float:
        return self._deadline(self._missing - self._closed)

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

    def _seconds(self, chunk: int) -> float:
        speed = (self._speed.bytes_per_second or 1.0) * (1 - MARGIN)
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
                size += other.rungs[0].size
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

    def _to_come(self) -> list[Ladder]:
        return [self._ladders[chunk] for chunk in self._missing - self._closed - self._meanwhile(self._all_by())]

    def _open_decode(self) -> float:
        return sum(self.task.decode(ladder.tokens, ladder.rungs[0].level) for ladder in self._to_come())

    def _bases_flying(self) -> frozenset[int]:
        return self._chunks_flying & self._missing

    def _is_base(self, fetch: Fetch) -> bool:
        first = next((flight.fetch for flight in self._flying if flight.fetch.chunk == fetch.chunk), None)
        return fetch == first and fetch.chunk in self._missing

    def _level(self, chunk: int) -> str | None:
        number = self._reached[chunk]
        return self._ladders[chunk].rungs[number].level if number >= 0 else None

    def _count(self, chunk: int) -> None:
        ladder = self._ladders[chunk]
        self._reached[chunk] = ladder.reached(self._held[chunk])
        self._reaching[chunk] = ladder.reached(self._coming(ladder))
        if self._reached[chunk] >= 0:
            self._missing -= {chunk}

    def _ask(self, now: float, ladder: Ladder, number: int, decision: str) -> Fetch:
        rung = ladder.rungs[number]
        rate = self._estimator.bytes_per_second
        fetch = Fetch(ladder.chunk, rung.level, rung.absent(self._coming(ladder)), rate)
        self._flying.append(Flight(fetch, now, decision))
        self._count(ladder.chunk)
        return fetch

    def _coming(self, ladder: Ladder) -> set[str]:
        flying = [flight.fetch for flight in self._flying if flight.fetch.chunk == ladder.chunk]
        return self._held[ladder.chunk].union(part.level for fetch in flying for part in fetch.parts)

    @property
    def _chunks_flying(self) -> frozenset[int]:
        return frozenset(flight.fetch.chunk for flight in self._flying)

    @property
    def _rate(self) -> float | None:
        """Bytes a second that are counted on; None: no estimate."""
        rate = self._estimator.bytes_per_second
        return None if rate is None else rate * (1 - MARGIN)

    @property
    def _busy_since(self) -> float:
        return max(self._last_end, self._flying[0].at)

    def _arrival(self, now: float, size: int, rate: float) -> float:
        waiting = sum(flight.fetch.size for flight in self._flying)
        free = max(now, self._busy_since + waiting / rate) if self._flying else now
        return free + size / rate
