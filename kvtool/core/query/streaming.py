"""A prompt's chunks fetched from a shared tier under a time objective, while those before are decoded.

CacheGen (arXiv 2310.07240, section 5): what is fetched next, how fine, and what is computed from its text instead,
`core.streaming.policy` says; the simulator of `kvtool bench stream` runs the same policy. Here it meets a network.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvtool.core.codec.levels import LEVELS, LOSSY
from kvtool.core.errors import RemoteError
from kvtool.core.fusion.controller import Prompt, Span
from kvtool.core.fusion.hot import HotSource
from kvtool.core.fusion.plan import Plan, Segment, build_plan
from kvtool.core.fusion.source import KVSource, ReadStats, RecordMissing
from kvtool.core.fusion.speeds import LoadSpeed, Speeds
from kvtool.core.levels import recorded_losses
from kvtool.core.remote.arrivals import Arrivals
from kvtool.core.remote.catalogue import kv_names
from kvtool.core.remote.tier import Tier
from kvtool.core.streaming.estimate import DEFAULT_MARGIN, DEFAULT_PREDICTOR, make_estimator
from kvtool.core.streaming.ladder import Ladder, Part, Rung
from kvtool.core.streaming.policy import Adaptive, Fetch, Policy, Task

if TYPE_CHECKING:
    from kvtool.core.query.layout import Asked
    from kvtool.core.query.reply import QueryOptions

STREAMED = ("reuse", "epic", "blend", "infoflow", "union")  # modes that read every chunk
DEFAULT_MODE = "union"  # of `auto`
DEPTH = 2  # fetches asked for at once, so that the link never waits for a decision
_SLOWER = 1.1  # what computing is counted as, of what was measured: two runs of one pass differ by as much
_HERE = "here"  # stands for a level whose loading takes no time: it overlapped with fetching
_TEXT = "not fetched in time"


@dataclass(slots=True)
class Streamed:
    """What streaming left.

    Attributes
    ----------
    plan : with each chunk at the level that it reached; those that reached none are holes.
    source : where its KV is read: what was fetched is decoded already.
    rows : the decisions, `stream` of the reply.
    size : bytes fetched.
    ms : that it took.
    """

    plan: Plan
    source: KVSource
    rows: list[dict[str, Any]] = field(default_factory=list)
    size: int = 0
    ms: float = 0.0


def stream_prompt(
    store: Tier,
    asked: Asked,
    options: QueryOptions,
    mode: str,
    speeds: Speeds,
    source: KVSource,
    token_bytes: int,
    since: float,
) -> Streamed:
    """Fetch what a prompt lacks until the objective leaves time for nothing but computing.

    Parameters
    ----------
    mode : one of `STREAMED`.
    speeds : of computing on this machine.
    token_bytes : of one token's decoded KV, all layers.
    since : `perf_counter` of the question's start.
    """
    assert options.slo_ms is not None
    ladders = _ladders(store, asked, options)
    if not ladders:
        return Streamed(asked.plan, source)
    segments = asked.plan.segments
    if not isinstance(source, HotSource):
        # Room for every chunk twice: one that is refined is there at both levels for a moment.
        source = HotSource(source, 2 * asked.plan.length * token_bytes)
    decoding = _Decoding(source, speeds.layers)
    task = Task(ladders, _compute_of(asked.plan, speeds, mode, options), options.slo_ms / 1e3, decoding.seconds)
    policy = Adaptive(task, make_estimator(DEFAULT_PREDICTOR), DEFAULT_MARGIN)
    driver = _Driver(store, segments, policy, decoding, since)
    driver.run()
    decoding.finish()
    rows = [_row(row, segments) for row in policy.log]
    return Streamed(_at_levels(asked.plan, policy.levels), source, rows, driver.size)


def _row(row: dict[str, Any], segments: Sequence[Segment]) -> dict[str, Any]:
    rounded = {name: None if row[name] is None else round(row[name], 3) for name in _NUMBERS}
    return row | rounded | {"chunk": segments[row["chunk"]].source.chunk_id.hex()}


_NUMBERS = ("estimated_mbps", "measured_mbps", "fetch_ms")


# ---- what there is to choose from ----


def _ladders(store: Tier, asked: Asked, options: QueryOptions) -> tuple[Ladder, ...]:
    """Of the segments that lack something here, by their number in the prompt; the most relevant first."""
    scores = {0: float("inf")} | {number: hit.score for number, hit in enumerate(asked.hits, start=1)}
    numbered = [(number, segment) for number, segment in enumerate(asked.plan.segments[:-1]) if segment.cached]
    numbered.sort(key=lambda one: -scores[one[0]] if scores[one[0]] == scores[one[0]] else float(one[0]))
    found, losses = [], recorded_losses(store)
    for number, segment in numbered:
        if not store.is_here(segment.source.chunk_id, segment.source.level or ""):
            allowed = _allowed(options, losses, prefix=number == 0)
            found.append(Ladder.of(number, len(segment.ids), _rungs(store, segment, allowed)))
    return tuple(found)


def _allowed(options: QueryOptions, losses: Mapping[str, float], prefix: bool) -> dict[str, float]:
    """Losses of the levels that may be read."""
    exact = dict.fromkeys(("raw", "lossless"), 0.0)
    if prefix:
        return exact
    if options.level != "auto":
        return {options.level: losses.get(options.level, 0.0)}
    return exact | {
        level: losses[level] for level in LOSSY if losses.get(level, options.max_loss + 1) <= options.max_loss
    }


def _rungs(store: Tier, segment: Segment, allowed: Mapping[str, float]) -> list[Rung]:
    chunk = store.shared(segment.source.chunk_id)
    found = []
    for level in LEVELS:
        if chunk is None or level not in chunk.levels or level not in allowed:
            continue
        parts: list[Part] = []
        at: str | None = level
        while at is not None and at in chunk.levels:
            if not store.is_here(segment.source.chunk_id, at):
                parts.append(Part(at, chunk.levels[at].size))
            at = chunk.levels[at].base
        found.append(Rung(level, allowed[level], tuple(reversed(parts))))
    return found


def _compute_of(plan: Plan, speeds: Speeds, mode: str, options: QueryOptions) -> Callable[[frozenset[int]], float]:
    """Seconds of the pass after streaming, by the chunks that are computed from their text."""
    free = replace(speeds, loads={_HERE: LoadSpeed(0.0, 0.0, 0.0, 0.0)})
    known: dict[frozenset[int], float] = {}

    def seconds(text: frozenset[int]) -> float:
        if text not in known:
            spans = [
                Span(len(one.ids), "miss" if number in text else one.status, _HERE if one.cached else None)
                for number, one in enumerate(plan.segments)
            ]
            known[text] = _SLOWER * _seconds_of(Prompt(spans, free), mode, options, len(plan.chunks))
        return known[text]

    return seconds


def _seconds_of(prompt: Prompt, mode: str, options: QueryOptions, chunks: int) -> float:
    if mode in ("union", "infoflow", "blend"):
        return prompt.recompute(mode, options.ratio)  # type: ignore[arg-type]
    return prompt.recomputing(options.link_tokens * chunks if mode == "epic" else 0)


def _at_levels(plan: Plan, levels: Mapping[int, str | None]) -> Plan:
    sources = [segment.source for segment in plan.segments[:-1]]
    for number, level in levels.items():
        if level is None:
            sources[number] = replace(sources[number], level=None, reason=_TEXT, stored=True)
        else:
            sources[number] = replace(sources[number], level=level)
    prefix, *chunks = sources
    return build_plan(prefix, chunks, plan.segments[-1].ids)


# ---- fetching ----


@dataclass(slots=True)
class _Flight:
    fetch: Fetch
    asked_at: float
    waiting: deque[tuple[str, str, int]]  # blob, level, layer
    sound: bool = True


class _Driver:
    """Keeps to the order that `Policy` asks of its driver, over a tier's stream of values."""

    def __init__(
        self, store: Tier, segments: Sequence[Segment], policy: Policy, decoding: _Decoding, since: float
    ) -> None:
        self.size = 0
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
        self.size += len(arrival.value or b"")
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


# ---- decoding beside it ----


class _Decoding:
    """Decodes chunk by chunk in a thread, into the memory that the loader then reads."""

    def __init__(self, source: HotSource, layers: int) -> None:
        self._source, self._layers = source, layers
        self._waiting: queue.SimpleQueue[tuple[int, Segment] | None] = queue.SimpleQueue()
        self._latest: dict[int, str] = {}
        self._tokens, self._spent = 0, 0.0
        self._thread: threading.Thread | None = None

    def seconds(self, tokens: int, level: str) -> float:
        """What decoding has taken so far, a token; nothing before the first chunk."""
        return tokens * self._spent / self._tokens if self._tokens else 0.0

    def put(self, number: int, segment: Segment, level: str) -> None:
        """Decode a chunk at a level that is there now."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtool-decode", daemon=True)
            self._thread.start()
        self._latest[number] = level
        self._waiting.put((number, replace(segment, source=replace(segment.source, level=level))))

    def finish(self) -> None:
        """Return when all is decoded."""
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        import torch

        with torch.inference_mode():
            while (one := self._waiting.get()) is not None:
                number, segment = one
                if self._latest[number] == segment.source.level:  # else it has been refined meanwhile
                    self._decode(segment)

    def _decode(self, segment: Segment) -> None:
        started, stats = time.perf_counter(), ReadStats()
        try:
            for layer in range(self._layers):
                self._source.read([segment], layer, stats)
        except RecordMissing:
            return  # the loader meets it again, and makes it a hole
        self._spent += time.perf_counter() - started
        self._tokens += len(segment.ids)
