"""A prompt's chunks fetched from a shared tier under a time objective, while those before are decoded, and others are
computed.

CacheGen (arXiv 2310.07240, section 5) and Cake (arXiv 2410.03065, section 4): what is fetched next, how fine, and what
is computed from its text instead, `core.streaming.both_ends` says; samples/benchmarks/stream.py simulates the same
policy. Here it meets a network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.backend import Link
from kvtool.core.cache.store import Store
from kvtool.core.codec.levels import known
from kvtool.core.codec.rans.coder import compile_ahead
from kvtool.core.common.timeline import add_span
from kvtool.core.fusion.cost import MEMORY, PromptRows, Span, Speeds
from kvtool.core.fusion.plan import Plan, Segment, build_plan, with_stored_rows
from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.source import ChunkCache, KVSource, held_on
from kvtool.core.query.ahead import COMPUTED, BackgroundDecoder
from kvtool.core.query.fetching import Driver
from kvtool.core.query.fill import compute_alone, stands_alone
from kvtool.core.session.identity import MeasuredLosses
from kvtool.core.streaming.both_ends import BothEnds
from kvtool.core.streaming.estimate import make_estimator
from kvtool.core.streaming.ladder import Ladder, Part, Rung
from kvtool.core.streaming.policy import Task

if TYPE_CHECKING:
    from kvtool.core.query.layout import PromptLayout
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.session.session import Session

# What computing is counted as, of what was measured. That was at best and alone; the pass after streaming is not alone
# (what is left of decoding, what just came being let go of), and took 1.1 to 1.6 times as long on two cores.
_SLOWER = 1.5
_TEXT = "not fetched in time"


@dataclass(slots=True)
class Streamed:
    """Result of streaming.

    Attributes
    ----------
    plan : with each chunk at the level that it reached; chunks that reached none, and were not computed meanwhile, are
        holes.
    source : where its KV is read from; some of it is decoded already.
    holes : segments that were holes and were computed meanwhile: they are worth storing.
    rows : the decisions, `stream` of the reply.
    bytes_read : of the records that are decoded already.
    ms : duration of streaming.
    """

    plan: Plan
    source: KVSource
    holes: list[Segment] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    bytes_read: int = 0
    ms: float = 0.0


def stream_prompt(session: Session, asked: PromptLayout, options: QueryOptions, selector: Selector) -> Streamed:
    """Fetch what a prompt lacks until the objective leaves time for nothing but computing.

    Measuring this machine and compiling its decoders, once, is not the question's time.

    Parameters
    ----------
    selector : the mode that will answer: only what it reads is fetched.
    """
    speeds = session.speeds.speeds((MEMORY,), ())  # memory: decoding overlaps with fetching, placing does not
    compile_ahead(session.identity.dtype)
    started = time.perf_counter()
    streamed = _stream(session, asked, options, selector, speeds, started - asked.retrieve_ms / 1e3)
    streamed.ms = add_span(session.timeline, "stream", started) * 1e3
    return streamed


def _stream(
    session: Session, asked: PromptLayout, options: QueryOptions, selector: Selector, speeds: Speeds, since: float
) -> Streamed:
    store, link, source = session.store, session.store.link, session.source
    assert link is not None
    assert options.slo_ms is not None
    ladders = _ladders(store, link, asked.plan, options, selector, speeds.layers)
    if not ladders:
        return Streamed(asked.plan, source)
    segments = asked.plan.segments
    holes = {at: segment for at, segment in enumerate(segments[:-1]) if segment.status == "miss" and segment.ids}
    ladders += tuple(Ladder(at, len(hole.ids), ()) for at, hole in holes.items())
    if not isinstance(source, ChunkCache):
        limit = session.decoder.kv_bytes(asked.plan.length)
        source = ChunkCache(source, limit, device=held_on(session.decoder))
    ahead = BackgroundDecoder(source, speeds.layers, partial(compute_alone, session))
    computing = Computing(asked.plan, speeds, selector, frozenset(holes))
    alone = partial(_alone, session, asked.plan, speeds)
    task = Task(ladders, computing, options.slo_ms / 1e3, ahead.seconds, alone)
    policy = BothEnds(task, make_estimator(options.stream_predictor), options.stream_margin)
    Driver(link, segments, policy, ahead, since).run()
    levels = computing.settled(policy.levels | dict.fromkeys(policy.computed, COMPUTED))
    levels = {number: level for number, level in levels.items() if level is not None or number not in holes}
    return Streamed(
        plan=_at_levels(store, asked.plan, levels),
        source=source,
        holes=[hole for number, hole in holes.items() if number in policy.computed],
        rows=_rows(policy.log, segments),
        bytes_read=ahead.bytes_read(levels),
    )


def _alone(session: Session, plan: Plan, speeds: Speeds, number: int) -> float:
    """Seconds of computing a segment by itself; infinite where it cannot be."""
    segment = plan.segments[number]
    if not stands_alone(segment, session.identity):
        return math.inf
    rows, before = len(segment.ids), len(session.identity.lead_in.ids)
    return _SLOWER * speeds.passes.seconds(rows, rows * before + rows * (rows + 1) / 2)


def _rows(log: Sequence[dict[str, Any]], segments: Sequence[Segment]) -> list[dict[str, Any]]:
    rounded = [row | {name: None if row[name] is None else round(row[name], 3) for name in _NUMBERS} for row in log]
    return [row | {"chunk": segments[row["chunk"]].source.chunk_id.hex()} for row in rounded]


_NUMBERS = ("estimated_mbps", "measured_mbps", "fetch_ms", "meanwhile_ms")


# ---- what there is to choose from ----


def _ladders(
    store: Store, link: Link, plan: Plan, options: QueryOptions, selector: Selector, layers: int
) -> tuple[Ladder, ...]:
    """The ladders of the segments that are read and lack something here, the most relevant first.

    The prompt's beginning is last: its few tokens are never lossy, so it gains least for its bytes.
    """
    read = {segment.start for segment in selector.reads(plan, layers)}
    numbers = [at for at, segment in enumerate(plan.segments[:-1]) if segment.cached and segment.start in read]
    ladders, losses = [], MeasuredLosses(store)
    for number in sorted(numbers, key=lambda at: (at == 0, -plan.segments[at].source.relevance)):
        segment = plan.segments[number]
        exactly = number == 0 or selector.lossless
        rungs = rungs_of(link, segment, _allowed(link, segment, options, losses, exactly))
        ladder = Ladder.of(number, len(segment.ids), rungs)
        if ladder.rungs and ladder.rungs[-1].parts:  # else the best that is allowed is here
            ladders.append(ladder)
    return tuple(ladders)


def _allowed(
    link: Link, segment: Segment, options: QueryOptions, measured: MeasuredLosses, exactly: bool
) -> dict[str, float]:
    """Losses of the levels that may be read: lossy ones that lose little enough, else the one that was laid out."""
    offers, laid_out = link.offers(segment.source.chunk_id), segment.source.level or ""
    losses = measured.of(segment.source.chunk_id, offers or (laid_out,))
    if offers and options.level == "auto" and not exactly:
        lossy = {level: loss for level, loss in losses.items() if level in offers and loss <= options.max_loss}
        if lossy:
            return lossy
    return {laid_out: losses.get(laid_out, 0.0)}


def rungs_of(link: Link, segment: Segment, allowed: Mapping[str, float]) -> list[Rung]:
    """Return the levels that a segment can be fetched at, and their missing parts; `allowed`: losses by level."""
    offers = link.offers(segment.source.chunk_id)
    rungs = []
    for level in known(allowed):
        if level not in offers:
            continue
        parts: list[Part] = []
        at: str | None = level
        while at is not None and at in offers:
            if not link.is_here(segment.source.chunk_id, at):
                parts.append(Part(at, offers[at].size))
            at = offers[at].base
        rungs.append(Rung(level, allowed[level], tuple(reversed(parts))))
    return rungs


class Computing:
    """Seconds of the pass after streaming, by the chunks that are computed from their text.

    A mode that ranks by the question's attention takes two passes. Where next to all is text, one pass over all of it
    is sooner, and loses nothing: then everything is computed.

    Parameters
    ----------
    holes : what is stored nowhere; it is computed before where it is not among the texts.
    """

    def __init__(self, plan: Plan, speeds: Speeds, selector: Selector, holes: frozenset[int]) -> None:
        self._plan, self._speeds, self._selector, self._holes = plan, speeds, selector, holes
        self._everything = holes.union(at for at, segment in enumerate(plan.segments) if segment.cached)
        self._known: dict[frozenset[int], float] = {}

    def __call__(self, text: frozenset[int]) -> float:
        if text not in self._known:
            self._known[text] = self._pass(text)
        return self._known[text]

    def settled(self, levels: Mapping[int, str | None]) -> dict[int, str | None]:
        """The levels, or text for all where that is sooner."""
        text = frozenset(number for number, level in levels.items() if level is None)
        if text and self(self._everything) < self(text):
            return dict.fromkeys(self._everything)
        return dict(levels)

    def _pass(self, text: frozenset[int]) -> float:
        spans = [self._span(at, segment, text) for at, segment in enumerate(self._plan.segments)]
        return _SLOWER * self._selector.expected_seconds(PromptRows(spans, self._speeds))

    def _span(self, at: int, segment: Segment, text: frozenset[int]) -> Span:
        if at in self._holes - text:
            return Span(len(segment.ids), "hit", MEMORY)
        return Span(len(segment.ids), "miss" if at in text else segment.status, MEMORY if segment.cached else None)


def _at_levels(store: Store, plan: Plan, levels: Mapping[int, str | None]) -> Plan:
    sources = [segment.source for segment in plan.segments[:-1]]
    for number, level in levels.items():
        if level is None:
            sources[number] = replace(sources[number], level=None, reason=_TEXT, stored=True)
        else:
            sources[number] = replace(sources[number], level=level)
    prefix, *chunks = with_stored_rows(store, sources)
    return build_plan(prefix, chunks, plan.segments[-1].ids)
