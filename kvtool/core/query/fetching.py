"""A policy's fetches over the link of a store."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.cache.backend import Link, Stream, Wanted
from kvtool.core.errors import RemoteError
from kvtool.core.fusion.plan import Segment
from kvtool.core.query.ahead import BackgroundDecoder
from kvtool.core.streaming.policy import DEPTH, Fetch, Policy

_TICK = 0.01  # seconds after which it is looked again what the processor does, and should do


@dataclass(slots=True)
class _Flight:
    fetch: Fetch
    asked_at: float
    waiting: deque[tuple[Wanted, str, int]]  # what was asked for, level, layer
    sound: bool = True


class Driver:
    """Keeps to the order that `Policy` asks of its driver, over a tier's stream of values."""

    def __init__(
        self, link: Link, segments: Sequence[Segment], policy: Policy, ahead: BackgroundDecoder, since: float
    ) -> None:
        self._link, self._segments, self._policy, self._ahead = link, segments, policy, ahead
        self._since = since
        self._out: deque[_Flight] = deque()
        self._arrivals: Stream | None = None
        self._last_end = 0.0
        self._heard = 0.0  # when something came last, or was asked for with nothing outstanding

    def run(self) -> None:
        """Fetch and compute until the policy wants no more, or the tier is gone."""
        try:
            self._arrivals = self._link.arrivals()
            while self._ask():
                self._wait()
        except RemoteError as error:
            self._lose(error)
        finally:
            if self._arrivals is not None:
                self._arrivals.close()
            self._ahead.finish()
            self._see_to_computing()

    def _now(self) -> float:
        return time.perf_counter() - self._since

    def _ask(self) -> bool:
        """Begin what the policy wants; False: nothing is under way."""
        self._see_to_computing()
        while len(self._out) < DEPTH and (fetch := self._policy.next(self._now())) is not None:
            segment = self._segments[fetch.chunk]
            waiting: deque[tuple[Wanted, str, int]] = deque()
            for part in fetch.parts:
                wanted = self._link.wanted(segment.source.chunk_id, part.level)
                waiting += [(one, part.level, layer) for layer, one in enumerate(wanted)]
            if not self._out:
                self._heard = self._now()
            self._out.append(_Flight(fetch, self._now(), waiting))
            self._send(self._out[-1])
        if self._ahead.computing is None and (number := self._policy.compute(self._now())) is not None:
            self._ahead.compute(number, self._segments[number])
        return bool(self._out) or self._ahead.computing is not None

    def _see_to_computing(self) -> None:
        """Report what has been computed; stop what is not worth waiting for."""
        ended = self._ahead.ended()
        if ended is not None:
            self._policy.ended(ended.number, ended.seconds, self._now(), ended.whole)
        if (number := self._ahead.computing) is not None:
            limit = self._policy.stop_at(number)
            if limit is not None and limit <= self._now():
                self._ahead.stop()

    def _send(self, flight: _Flight) -> None:
        assert self._arrivals is not None
        self._arrivals.ask([wanted for wanted, _, _ in flight.waiting])

    def _wait(self) -> None:
        """Take one value of the oldest fetch, or give it up; a moment at most."""
        assert self._arrivals is not None
        if not self._out:
            self._ahead.wait(_TICK)
            return
        flight = self._out[0]
        if not flight.waiting:
            self._end(flight, self._now(), arrived=flight.sound)
            return
        limit = self._policy.give_up_at(flight.fetch)
        left = _TICK if limit is None else min(limit - self._now(), _TICK)
        if left <= 0:
            self._abandon(flight)
            return
        try:
            arrival = self._arrivals.take(left)
        except RemoteError:
            if not self._arrivals.alive:
                raise
            if self._now() - self._heard > self._link.timeout:
                text = f"{self._arrivals.url} sent nothing whole within {self._link.timeout:.3g} s"
                raise RemoteError(text) from None
            return
        self._heard = self._now()
        _, level, layer = flight.waiting.popleft()
        place = (self._segments[flight.fetch.chunk].source.chunk_id, level)
        flight.sound = self._link.keep(place, layer, arrival.value) and flight.sound
        if not flight.waiting:
            self._end(flight, arrival.at - self._since, arrived=flight.sound)

    def _end(self, flight: _Flight, at: float, arrived: bool) -> None:
        self._out.remove(flight)
        started = max(flight.asked_at, self._last_end)
        self._last_end = max(started, at)
        self._policy.done(flight.fetch, started, self._last_end, arrived)
        if arrived:
            self._ahead.put(flight.fetch.chunk, self._segments[flight.fetch.chunk], flight.fetch.level)

    def _abandon(self, flight: _Flight) -> None:
        """Give a fetch up. Its values are still on their way, so the others are asked for on another connection."""
        assert self._arrivals is not None
        self._arrivals.close()
        self._end(flight, self._now(), arrived=False)
        self._arrivals = self._link.arrivals()
        self._heard = self._now()
        for other in self._out:
            self._send(other)

    def _lose(self, error: RemoteError) -> None:
        """The tier is gone: what is outstanding failed, and nothing more is asked."""
        self._link.give_up(error)
        while self._out:
            self._end(self._out[0], self._now(), arrived=False)
        while (fetch := self._policy.next(self._now())) is not None:
            self._policy.done(fetch, self._now(), self._now(), False)
