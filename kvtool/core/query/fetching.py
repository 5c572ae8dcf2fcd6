"""A policy's fetches over a real tier, and what has come decoded while more is on its way."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtool.core.errors import RemoteError
from kvtool.core.fusion.hot import HotSource
from kvtool.core.fusion.plan import Segment
from kvtool.core.fusion.source import ReadStats, RecordMissing
from kvtool.core.remote.arrivals import Arrivals
from kvtool.core.remote.catalogue import kv_names
from kvtool.core.remote.tier import Tier
from kvtool.core.streaming.policy import Fetch, Policy
from kvtool.core.streaming.simulate import DEPTH


@dataclass(slots=True)
class _Flight:
    fetch: Fetch
    asked_at: float
    waiting: deque[tuple[str, str, int]]  # blob, level, layer
    sound: bool = True


class Driver:
    """Keeps to the order that `Policy` asks of its driver, over a tier's stream of values."""

    def __init__(
        self, store: Tier, segments: Sequence[Segment], policy: Policy, decoding: Decoding, since: float
    ) -> None:
        self._store, self._segments, self._policy, self._decoding = store, segments, policy, decoding
        self._since = since
        self._out: deque[_Flight] = deque()
        self._arrivals: Arrivals | None = None
        self._last_end = 0.0

    def run(self) -> None:
        """Until the policy wants no more, or the tier is gone."""
        try:
            self._arrivals = self._store.arrivals()
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
        while len(self._out) < DEPTH and (fetch := self._policy.next(self._now())) is not None:
            segment = self._segments[fetch.chunk]
            chunk = self._store.shared(segment.source.chunk_id)
            names: list[tuple[str, str, int]] = []
            for part in fetch.parts if chunk is not None else ():
                blobs = kv_names(segment.source.chunk_id.hex(), chunk, part.level)  # type: ignore[arg-type]
                names += [(name, part.level, layer) for layer, name in enumerate(blobs)]
            self._out.append(_Flight(fetch, self._now(), deque(names)))
            self._send(self._out[-1])
        return bool(self._out)

    def _send(self, flight: _Flight) -> None:
        assert self._arrivals is not None
        self._arrivals.ask([name for name, _, _ in flight.waiting])

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
        patience = self._store.timeout
        try:
            arrival = self._arrivals.take(patience if left is None else min(left, patience))
        except RemoteError:
            if left is None or left > patience or not self._arrivals.alive:
                raise
            self._abandon(flight)
            return
        _, level, layer = flight.waiting.popleft()
        place = (self._segments[flight.fetch.chunk].source.chunk_id, level)
        flight.sound = self._store.keep(place, layer, arrival.value) and flight.sound
        if not flight.waiting:
            self._end(flight, arrival.at - self._since, arrived=flight.sound)

    def _end(self, flight: _Flight, at: float, arrived: bool) -> None:
        self._out.remove(flight)
        started = max(flight.asked_at, self._last_end)
        self._last_end = max(started, at)
        self._policy.done(flight.fetch, started, self._last_end, arrived)
        if arrived:
            self._decoding.put(flight.fetch.chunk, self._segments[flight.fetch.chunk], flight.fetch.level)

    def _abandon(self, flight: _Flight) -> None:
        """Give a fetch up. Its values are still on their way, so the others are asked for on another connection."""
        assert self._arrivals is not None
        self._arrivals.close()
        self._end(flight, self._now(), arrived=False)
        self._arrivals = self._store.arrivals()
        for other in self._out:
            self._send(other)

    def _lose(self, error: RemoteError) -> None:
        """The tier is gone: what is outstanding failed, and nothing more is asked."""
        self._store.give_up(error)
        while self._out:
            self._end(self._out[0], self._now(), arrived=False)
        while (fetch := self._policy.next(self._now())) is not None:
            self._policy.done(fetch, self._now(), self._now(), False)


def warm_up(dtype: str) -> None:
    """Compile what decodes to this format, before a question's time begins to count."""
    from kvtool.core.codec.entropy import native

    for kind in (dtype, "int16"):  # as it is, and what a finer level refines
        native.kernel(kind)


@dataclass(slots=True)
class _Ahead:
    """What has been decoded, or begun to be."""

    segment: Segment
    stats: ReadStats = field(default_factory=ReadStats)


class Decoding:
    """Decodes what has come in a thread, into the memory that the loader then reads, while more is on its way.

    Work that is saved, and never waited for: a chunk that is refined meanwhile is begun anew, and what is not decoded
    at the end the loader decodes layer by layer beside the computing, several chunks together. The chunk that came last
    is taken first: the others may be refined sooner.
    """

    def __init__(self, source: HotSource, layers: int) -> None:
        self._source, self._layers = source, layers
        self._changed = threading.Condition()
        self._waiting: dict[int, Segment] = {}  # by number in the prompt; the last one came last
        self._ahead: dict[int, _Ahead] = {}
        self._stopped = False
        self._begun: set[str | None] = set()
        self._taken: dict[str | None, tuple[float, float]] = {}  # by level: seconds, tokens
        self._thread: threading.Thread | None = None

    def seconds(self, tokens: int, level: str) -> float:
        """What decoding at this level has taken beside the fetching; where nothing is known of it, as the slowest.

        The first chunk of a level does not count, since it waits for tables and compilers.
        """
        rates = {level: seconds / tokens for level, (seconds, tokens) in self._taken.items()}
        return tokens * rates.get(level, max(rates.values(), default=0.0))

    def put(self, number: int, segment: Segment, level: str) -> None:
        """Decode a chunk at a level that is there now."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtool-decode", daemon=True)
            self._thread.start()
        with self._changed:
            self._waiting.pop(number, None)
            self._waiting[number] = replace(segment, source=replace(segment.source, level=level))
            self._changed.notify()

    def finish(self) -> None:
        """End after the layer that is being decoded."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def bytes_read(self, levels: Mapping[int, str | None]) -> int:
        """Of the records that were decoded at the level at which their chunk stands in the end."""
        return sum(
            one.stats.bytes_read for number, one in self._ahead.items() if one.segment.source.level == levels[number]
        )

    def _run(self) -> None:
        import torch

        with torch.inference_mode():
            while (one := self._next()) is not None:
                self._decode(*one)

    def _next(self) -> tuple[int, Segment] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._waiting)
            return None if self._stopped else self._waiting.popitem()

    def _decode(self, number: int, segment: Segment) -> None:
        if number in self._ahead:
            self._source.forget(self._ahead[number].segment)
        one = self._ahead[number] = _Ahead(segment)
        started, done = time.perf_counter(), 0
        try:
            while done < self._layers and not self._stopped and number not in self._waiting:
                self._source.read([segment], done, one.stats)
                done += 1
        except RecordMissing:
            return  # the loader meets it again, and makes it a hole
        if segment.source.level in self._begun:
            self._learn(segment, time.perf_counter() - started, done / self._layers)
        self._begun.add(segment.source.level)

    def _learn(self, segment: Segment, seconds: float, share: float) -> None:
        before = self._taken.get(segment.source.level, (0.0, 0.0))
        self._taken[segment.source.level] = before[0] + seconds, before[1] + share * len(segment.ids)
