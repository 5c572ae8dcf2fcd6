"""A policy's fetches over the link of a store."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.core.cache.link import Link, Stream, Wanted
from kvtool.core.errors import RemoteError
from kvtool.core.fusion.plan import Segment
from kvtool.core.query.ahead import Ahead
from kvtool.core.streaming.policy import DEPTH, Fetch, Policy


@dataclass(slots=True)
class _Flight:
    fetch: Fetch
    asked_at: float
    waiting: deque[tuple[Wanted, str, int]]  # what was asked for, level, layer
    sound: bool = True


class Driver:
    """Keeps to the order that `Policy` asks of its driver, over a tier's stream of values."""

    def __init__(self, link: Link, segments: Sequence[Segment], policy: Policy, ahead: Ahead, since: float) -> None:
        self._link, self._segments, self._policy, self._ahead = link, segments, policy, ahead
        self._since = since
        self._out: deque[_Flight] = deque()
        self._arrivals: Stream | None = None
        self._last_end = 0.0

    def run(self) -> None:
        """Fetch until the policy wants no more, or the tier is gone."""
        try:
            self._arrivals = self._link.arrivals()
            while self._ask():
                self._wait()
        except RemoteError as error:
            self._lose(error)
        finally:
            if self._arrivals is not None:
                self._arrivals.close()

    def _now(self) -> float:
        return time.perf_counter() - self._since

    def _ask(self) -> bool:
        """Ask for what the policy wants; False: nothing is outstanding."""
        for number in self._ahead.computed:
            self._policy.have(number)
        while len(self._out) < DEPTH and (fetch := self._policy.next(self._now())) is not None:
            segment = self._segments[fetch.chunk]
            waiting: deque[tuple[Wanted, str, int]] = deque()
            for part in fetch.parts:
                wanted = self._link.wanted(segment.source.chunk_id, part.level)
                waiting += [(one, part.level, layer) for layer, one in enumerate(wanted)]
            self._out.append(_Flight(fetch, self._now(), waiting))
            self._send(self._out[-1])
        for number in self._policy.unwanted if self._out else ():
            self._ahead.compute(number, self._segments[number])
        return bool(self._out)

    def _send(self, flight: _Flight) -> None:
        assert self._arrivals is not None
        self._arrivals.ask([wanted for wanted, _, _ in flight.waiting])

    def _wait(self) -> None:
        """Take one value of the oldest fetch, or give it up."""
        assert self._arrivals is not None
        flight = self._out[0]
        if not flight.waiting:
            self._end(flight, self._now(), arrived=flight.sound)
            return
        limit = self._policy.give_up_at(flight.fetch)
        left = None if limit is None else limit - self._now()
        if left is not None and left <= 0:
            self._abandon(flight)
            return
        patience = self._link.timeout
        try:
            arrival = self._arrivals.take(patience if left is None else min(left, patience))
        except RemoteError:
            if left is None or left > patience or not self._arrivals.alive:
                raise
            self._abandon(flight)
            return
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
        for other in self._out:
            self._send(other)

    def _lose(self, error: RemoteError) -> None:
        """The tier is gone: what is outstanding failed, and nothing more is asked."""
        self._link.give_up(error)
        while self._out:
            self._end(self._out[0], self._now(), arrived=False)
        while (fetch := self._policy.next(self._now())) is not None:
            self._policy.done(fetch, self._now(), self._now(), False)
