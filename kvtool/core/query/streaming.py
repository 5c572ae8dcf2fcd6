"""Fetching of a prompt's chunks from a shared store under a time objective, while those before are decoded, and others
are computed.

CacheGen (arXiv 2310.07240, section 5) and Cake (arXiv 2410.03065, section 4). `streaming/policy.py`
decides what is fetched next, how fine, and what is computed from its text instead; samples/benchmarks/stream.py
simulates the same policy. Here it runs over a network.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.cache.backend import BlobRequest, RemoteBackend, Stream
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import RAW, known
from kvtool.core.codec.rans.coder import compile_ahead
from kvtool.core.common.types import add_span
from kvtool.core.errors import RemoteError
from kvtool.core.fusion.plan import MEMORY, Plan, PromptRows, Segment, Span, Speeds, build_plan, with_stored_rows
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.source import ChunkCache, ReadStats, held_on
from kvtool.core.model.prefill import LeadIn, PrefillItem, PrefillStopped, prefill_chunks
from kvtool.core.query.prompt import PromptSource
from kvtool.core.session.identity import MeasuredLosses
from kvtool.core.streaming import Fetch, Harmonic, Ladder, Part, Rung, Task
from kvtool.core.streaming.policy import DEPTH, Policy

if TYPE_CHECKING:
    from kvtool.core.model.prefill import ChunkKV
    from kvtool.core.query.options import LoadOptions
    from kvtool.core.query.prompt import PromptLayout
    from kvtool.core.session.session import Session


# What computing is counted as, of what was measured. That was at best, on an idle machine; the pass after streaming is
# slowed (by the rest of decoding, and freeing what just came), and took 1.1 to 1.6 times as long on two cores.
_SLOWER = 1.5
_TEXT = "not fetched in time"


def fetch_prompt(session: Session, layout: PromptLayout, options: LoadOptions, selector: Selector) -> PromptSource:
    """Fetch what a prompt lacks until the objective leaves time only for computing. Calibration does not count."""
    speeds = session.speeds.speeds((MEMORY,), ())  # memory: decoding overlaps with fetching, placing does not
    compile_ahead()
    started = time.perf_counter()
    store, link, plan = session.store, session.store.link, layout.plan
    assert link is not None
    assert options.slo_ms is not None
    fetched = PromptSource(plan, session.source)
    if ladders := _ladders(store, link, plan, options, selector, speeds.layers):
        segments = plan.segments
        holes = {at: segment for at, segment in enumerate(segments[:-1]) if segment.status == "miss" and segment.ids}
        ladders += tuple(Ladder(at, len(hole.ids), ()) for at, hole in holes.items())
        source = session.source
        if not isinstance(source, ChunkCache):
            source = ChunkCache(source, session.decoder.kv_bytes(plan.length), device=held_on(session.decoder))
        ahead = BackgroundDecoder(source, speeds.layers, partial(compute_alone, session))
        computing = Computing(plan, speeds, selector, frozenset(holes))
        alone = partial(_alone, session, plan, speeds)
        task = Task(ladders, computing, options.slo_ms / 1e3, ahead.seconds, alone)
        policy = Policy(task, Harmonic())
        Driver(link, segments, policy, ahead, started - layout.retrieve_ms / 1e3).run()
        levels = computing.settled(policy.levels | dict.fromkeys(policy.computed, COMPUTED))
        levels = {number: level for number, level in levels.items() if level is not None or number not in holes}
        computed = [hole for number, hole in holes.items() if number in policy.computed]
        rows = _rows(policy.log, segments)
        fetched = PromptSource(_at_levels(store, plan, levels), source, computed, rows, ahead.bytes_read(levels))
    fetched.fetch_ms = add_span(session.timeline, "stream", started) * 1e3
    return fetched


def _alone(session: Session, plan: Plan, speeds: Speeds, number: int) -> float:
    """Return the seconds of computing a segment by itself; infinite where that is not possible."""
    segment = plan.segments[number]
    if session.identity.spec_of(segment.source.chunk_id, segment.ids) is None:
        return math.inf
    rows, before = len(segment.ids), len(session.identity.lead_in.ids)
    return _SLOWER * speeds.passes.seconds(rows, rows * before + rows * (rows + 1) / 2)


def compute_alone(session: Session, segment: Segment, going: Callable[[], bool]) -> ChunkKV | None:
    """Return a segment's KV after the store's lead-in, as ingest would store it: on the CPU the same bits. None:
    `going` said to stop."""
    is_prefix = segment.source.chunk_id == session.identity.prefix_id
    lead_in = LeadIn(session.decoder, ()) if is_prefix else session.lead_ins.own
    try:
        return prefill_chunks(session.decoder, lead_in, [PrefillItem(segment.ids)], going=going)[0]
    except PrefillStopped:
        return None


def _rows(log: Sequence[dict[str, Any]], segments: Sequence[Segment]) -> list[dict[str, Any]]:
    names = "estimated_mbps", "measured_mbps", "fetch_ms", "compute_ms"
    rounded = [row | {name: None if row[name] is None else round(row[name], 3) for name in names} for row in log]
    return [row | {"chunk": segments[row["chunk"]].source.chunk_id.hex()} for row in rounded]


# ---- the choices ----


def _ladders(
    store: Store, link: RemoteBackend, plan: Plan, options: LoadOptions, selector: Selector, layers: int
) -> tuple[Ladder, ...]:
    """Return the ladders of the segments that lack something here, the most relevant first, the prompt's beginning
    last: its few tokens are never lossy, so it gains least for its bytes."""
    read = {segment.start for segment in selector.reads(plan, layers)}
    numbers = [at for at, segment in enumerate(plan.segments[:-1]) if segment.cached and segment.start in read]
    ladders, measured = [], MeasuredLosses(store)
    for number in sorted(numbers, key=lambda at: (at == 0, -plan.segments[at].source.relevance)):
        segment = plan.segments[number]
        allows_loss = options.level == "auto" and number > 0 and not selector.lossless
        losses = _allowed_losses(link, segment, measured, options.max_loss if allows_loss else None)
        ladder = Ladder.of(number, len(segment.ids), rungs_of(link, segment, losses))
        if ladder.rungs and ladder.rungs[-1].parts:  # else the best that is allowed is here
            ladders.append(ladder)
    return tuple(ladders)


def _allowed_losses(
    link: RemoteBackend, segment: Segment, measured: MeasuredLosses, max_loss: float | None
) -> dict[str, float]:
    """Return the losses of the levels that may be read: those offered that lose little enough, else the planned one."""
    offers, planned = link.offers(segment.source.chunk_id), segment.source.level or ""
    losses = measured.of(segment.source.chunk_id, offers or (planned,))
    allowed = {level: loss for level, loss in losses.items() if level in offers and loss <= (max_loss or 0.0)}
    return allowed if allowed and max_loss is not None else {planned: losses.get(planned, 0.0)}


def rungs_of(link: RemoteBackend, segment: Segment, losses: Mapping[str, float]) -> list[Rung]:
    """Return the levels that a segment can be fetched at, and their missing parts; `losses`: of the allowed levels."""
    offers = link.offers(segment.source.chunk_id)
    rungs = []
    for level in (level for level in known(losses) if level in offers):
        parts: list[Part] = []
        at: str | None = level
        while at is not None and at in offers:
            if not link.is_here(segment.source.chunk_id, at):
                parts.append(Part(at, offers[at].size))
            at = offers[at].base
        rungs.append(Rung(level, losses[level], tuple(reversed(parts))))
    return rungs


class Computing:
    """Seconds of the pass after streaming, by the chunks that are computed from their text. A mode that ranks by
    attention takes two passes, so where almost all is text, one pass over everything is sooner. `holes`: what is stored
    nowhere."""

    def __init__(self, plan: Plan, speeds: Speeds, selector: Selector, holes: frozenset[int]) -> None:
        self._plan, self._speeds, self._selector, self._holes = plan, speeds, selector, holes
        self._everything = holes.union(at for at, segment in enumerate(plan.segments) if segment.cached)
        self._seconds = functools.cache(self._pass)

    def __call__(self, text: frozenset[int]) -> float:
        return self._seconds(text)

    def settled(self, levels: Mapping[int, str | None]) -> dict[int, str | None]:
        text = frozenset(number for number, level in levels.items() if level is None)
        if text and self(self._everything) < self(text):
            return dict.fromkeys(self._everything)
        return dict(levels)

    def _pass(self, text: frozenset[int]) -> float:
        spans = [self._span(at, segment, text) for at, segment in enumerate(self._plan.segments)]
        return _SLOWER * self._selector.expected_seconds(PromptRows(spans, self._speeds))

    def _span(self, at: int, segment: Segment, text: frozenset[int]) -> Span:
        status = "miss" if at in text else "hit" if at in self._holes else segment.status
        return Span(len(segment.ids), status, MEMORY if segment.cached or at in self._holes - text else None)


def _at_levels(store: Store, plan: Plan, levels: Mapping[int, str | None]) -> Plan:
    sources = [segment.source for segment in plan.segments[:-1]]
    for number, level in levels.items():
        fields = {"level": level} if level is not None else {"level": None, "reason": _TEXT, "stored": True}
        sources[number] = replace(sources[number], **fields)
    prefix, *chunks = with_stored_rows(store, sources)
    return build_plan(prefix, chunks, plan.segments[-1].ids)


_TICK = 0.01  # seconds between looks at what the processor does, and should do


@dataclass(slots=True)
class _Flight:
    fetch: Fetch
    sent_at: float
    waiting: deque[tuple[BlobRequest, str, int]]  # with level and layer
    sound: bool = True


class Driver:
    """Keeps to the order that `Policy` asks of its driver, over a shared store's stream of values."""

    def __init__(
        self, link: RemoteBackend, segments: Sequence[Segment], policy: Policy, ahead: BackgroundDecoder, since: float
    ) -> None:
        self._link, self._segments, self._policy, self._ahead = link, segments, policy, ahead
        self._since = since
        self._out: deque[_Flight] = deque()
        self._last_end = 0.0
        self._heard = 0.0  # when something came last, or was asked for with nothing outstanding

    def run(self) -> None:
        try:
            self._arrivals: Stream = self._link.arrivals()
            try:
                while self._begin_fetches():
                    self._wait()
            finally:
                self._arrivals.close()
        except RemoteError as error:
            self._lose(error)
        finally:
            self._ahead.finish()
            self._follow_computing()

    def _now(self) -> float:
        return time.perf_counter() - self._since

    def _begin_fetches(self) -> bool:
        """Begin what the policy asks for; False: nothing is under way."""
        self._follow_computing()
        while len(self._out) < DEPTH and (fetch := self._policy.next(self._now())) is not None:
            segment = self._segments[fetch.chunk]
            waiting = deque(
                (request, part.level, layer)
                for part in fetch.parts
                for layer, request in enumerate(self._link.wanted(segment.source.chunk_id, part.level))
            )
            if not self._out:
                self._heard = self._now()
            self._out.append(_Flight(fetch, self._now(), waiting))
            self._arrivals.ask([request for request, _, _ in waiting])
        if self._ahead.computing is None and (number := self._policy.compute(self._now())) is not None:
            self._ahead.compute(number, self._segments[number])
        return bool(self._out) or self._ahead.computing is not None

    def _follow_computing(self) -> None:
        if (ended := self._ahead.ended()) is not None:
            self._policy.ended(ended.number, ended.seconds or 0.0, self._now(), ended.whole)
        if (number := self._ahead.computing) is not None and self._policy.stop_at(number) <= self._now():
            self._ahead.stop()

    def _wait(self) -> None:
        if not self._out:
            self._ahead.wait(_TICK)
            return
        flight = self._out[0]
        if not flight.waiting:
            self._end(flight, self._now(), arrived=flight.sound)
            return
        left = min(self._policy.give_up_at(flight.fetch) - self._now(), _TICK)
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
        record = self._segments[flight.fetch.chunk].source.chunk_id, level
        flight.sound = self._link.keep(record, layer, arrival.value) and flight.sound
        if not flight.waiting:
            self._end(flight, arrival.at - self._since, arrived=flight.sound)

    def _end(self, flight: _Flight, at: float, arrived: bool) -> None:
        self._out.remove(flight)
        started = max(flight.sent_at, self._last_end)
        self._last_end = max(started, at)
        self._policy.done(flight.fetch, started, self._last_end, arrived)
        if arrived:
            self._ahead.put(flight.fetch.chunk, self._segments[flight.fetch.chunk], flight.fetch.level)

    def _abandon(self, flight: _Flight) -> None:
        """Give a fetch up. Its values are still on their way, so the others are asked for on another connection."""
        self._arrivals.close()
        self._end(flight, self._now(), arrived=False)
        self._arrivals = self._link.arrivals()
        self._heard = self._now()
        for other in self._out:
            self._arrivals.ask([request for request, _, _ in other.waiting])

    def _lose(self, error: RemoteError) -> None:
        """Give the shared store up: outstanding requests failed, and no further ones are sent."""
        self._link.give_up(error)
        while self._out:
            self._end(self._out[0], self._now(), arrived=False)
        while (fetch := self._policy.next(self._now())) is not None:
            self._policy.done(fetch, self._now(), self._now(), False)


COMPUTED = RAW  # the level of what was computed from its text: it loses nothing

# What ingest would store of a segment; None: the second argument said to stop.
Prefill = Callable[[Segment, Callable[[], bool]], "ChunkKV | None"]


@dataclass(eq=False, slots=True)
class Computation:
    """A chunk that is computed from its text. `seconds`: without the decoding in between; None: it has not ended."""

    number: int
    segment: Segment
    cut_off: bool = False  # it is to be stopped
    seconds: float | None = None
    whole: bool = False


class BackgroundDecoder:
    """Decodes and computes into the memory that the loader then reads, while fetches are outstanding. It is never
    waited for: the loader decodes what is left. The chunk that came last is decoded first, since the others may be
    refined sooner. A chunk is computed from its text when there is nothing to decode."""

    def __init__(self, source: ChunkCache, layers: int, prefill: Prefill) -> None:
        self._source, self._layers, self._prefill = source, layers, prefill
        self._changed = threading.Condition()
        self._waiting: dict[int, Segment] = {}  # by number in the prompt; the last one came last
        self._computation: Computation | None = None  # until `ended` has returned it
        self._computed: set[int] = set()
        self._decoding = 0.0  # seconds, of all so far
        self._ahead: dict[int, tuple[Segment, ReadStats]] = {}
        self._stopped = False
        self._seen_levels: set[str | None] = set()
        self._taken: dict[str | None, tuple[float, float]] = {}  # by level: seconds, tokens
        self._thread: threading.Thread | None = None

    def seconds(self, tokens: int, level: str) -> float:
        """Return the seconds of decoding during a fetch; an unmeasured level counts as the slowest. The first chunk of
        a level does not count: it waits for tables and compilers."""
        with self._changed:
            rates = {name: took / decoded for name, (took, decoded) in self._taken.items()}
        return tokens * rates.get(level, max(rates.values(), default=0.0))

    def put(self, number: int, segment: Segment, level: str) -> None:
        with self._changed:
            if number in self._computed:
                return
            self._waiting.pop(number, None)
            self._waiting[number] = replace(segment, source=replace(segment.source, level=level))
            self._begin()

    @property
    def computing(self) -> int | None:
        """Return the chunk that is being computed, or whose result `ended` has not returned yet."""
        with self._changed:
            return None if self._computation is None else self._computation.number

    def compute(self, number: int, segment: Segment) -> None:
        """Compute a chunk without other chunks; only one is computed at a time."""
        with self._changed:
            assert self._computation is None
            self._computation = Computation(number, segment)
            self._begin()

    def stop(self) -> None:
        with self._changed:
            if self._computation is not None:
                self._computation.cut_off = True

    def ended(self) -> Computation | None:
        """Return the computation when it has ended, once; else None."""
        with self._changed:
            if (ended := self._computation) is None or ended.seconds is None:
                return None
            self._computation = None
            return ended

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_to_compute(), seconds)

    def _is_to_compute(self) -> bool:
        return self._computation is not None and self._computation.seconds is None

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtool-ahead", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def bytes_read(self, levels: Mapping[int, str | None]) -> int:
        """Return the bytes of the records that were decoded at the level that their chunk has in the end."""
        decoded = self._ahead.items()
        return sum(stats.bytes_read for number, (each, stats) in decoded if each.source.level == levels[number])

    def _run(self) -> None:
        with torch.inference_mode():
            while (work := self._next()) is not None:
                work()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._waiting or self._is_to_compute())
            if self._stopped:
                return None
            if self._waiting:
                return partial(self._decode, *self._waiting.popitem())
            assert self._computation is not None
            return partial(self._compute, self._computation)

    def _compute(self, computation: Computation) -> None:
        started, decoding, number = time.perf_counter(), self._decoding, computation.number
        with suppress(Exception):  # the pass after streaming meets it again; others wait for this thread's end
            kv = self._prefill(computation.segment, self._decode_waiting)
            computation.whole = kv is not None and self._hold(number, computation.segment, kv)
        with self._changed:
            if computation.whole:
                self._computed.add(number)
                self._waiting.pop(number, None)
            computation.seconds = time.perf_counter() - started - (self._decoding - decoding)
            self._changed.notify_all()

    def _decode_waiting(self) -> bool:
        """Decode the chunks that have come meanwhile; return whether to continue computing."""
        while not self._stopped:
            with self._changed:
                if self._computation is not None and self._computation.cut_off:
                    return False
                if not self._waiting:
                    return True
                number, segment = self._waiting.popitem()
            self._decode(number, segment)
        return False

    def _hold(self, number: int, segment: Segment, kv: ChunkKV) -> bool:
        """Hold what was computed instead of what came; False: a batch's memory is smaller than the chunk."""
        if number in self._ahead:
            self._source.forget(self._ahead[number][0])
        computed = replace(segment, source=replace(segment.source, level=COMPUTED))
        self._source.hold(computed, kv.layers)
        return self._source.holds(computed, self._layers)

    def _decode(self, number: int, segment: Segment) -> None:
        if number in self._ahead:
            self._source.forget(self._ahead[number][0])
        level, stats = segment.source.level, ReadStats()
        self._ahead[number] = segment, stats
        started, done = time.perf_counter(), 0
        try:
            while done < self._layers and not self._stopped and number not in self._waiting:
                self._source.read([segment], done, stats)
                done += 1
        except Exception:
            return  # the loader meets it again, and makes what is damaged a hole
        finally:
            self._decoding += time.perf_counter() - started
        if done and level in self._seen_levels:
            with self._changed:
                seconds, tokens = self._taken.get(level, (0.0, 0.0))
                tokens += done / self._layers * len(segment.ids)
                self._taken[level] = seconds + time.perf_counter() - started, tokens
        self._seen_levels.add(level)
