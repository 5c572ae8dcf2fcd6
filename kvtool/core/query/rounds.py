"""A prompt in rounds: the best chunks first, more of them behind as long as the answer is unsure; and a conversation's
next turn behind those that stand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.core.common.timeline import add_span
from kvtool.core.fusion.engine import Fused, extend_fused, fuse, joined
from kvtool.core.fusion.plan import Plan, build_plan
from kvtool.core.fusion.prefix_cache import PrefixFused, extend_prefix
from kvtool.core.fusion.source import KVSource
from kvtool.core.model.generate import GreedyPrefix, greedy_prefix
from kvtool.core.model.states import StateCache
from kvtool.core.query.defer import ALL_LOADED, PROBED, Round, RoundVerdict, confidence, judge, spans

if TYPE_CHECKING:
    from kvtool.core.common.timeline import Timeline
    from kvtool.core.fusion.selectors.base import Selector
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.query.layout import CachedPrefix
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.session.session import Session


@dataclass(frozen=True, slots=True)
class Step:
    """A round, fused.

    Attributes
    ----------
    fused : all rounds up to this one. `now`: this one alone.
    last : no chunk is left to load.
    milliseconds : of fusing it.
    """

    fused: Fused
    now: Fused
    last: bool
    milliseconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The prompt that the answer is given from.

    Attributes
    ----------
    begun : the answer's beginning, which the cache holds already; None after a last round.
    chained : of a model that keeps states: what is to be stored of the prompt.
    """

    fused: Fused
    begun: GreedyPrefix | None
    rounds: list[Round]
    chained: PrefixFused | None = None


def steps(
    decoder: Decoder,
    plan: Plan,
    selector: Selector,
    source: KVSource,
    options: QueryOptions,
    timeline: Timeline | None = None,
) -> Iterator[Step]:
    """Fuse a prompt round by round; each is fused when it is asked for.

    Parameters
    ----------
    plan : of all chunks, those of the first round first. The buffers have room for it and the answer from the start.
    """
    prefix, *chunks, question = plan.segments
    fused: Fused | None = None
    for start, stop in spans(len(chunks), options.defer_first):
        wanted = [segment.source for segment in chunks[start:stop]]
        began = time.perf_counter()
        if fused is None:
            first = build_plan(prefix.source, wanted, question.ids)
            room = plan.length - first.length + options.max_tokens
            now = fused = fuse(decoder, first, selector, source, room, timeline, options.load_timeout)
        else:
            now = extend_fused(decoder, fused, wanted, selector, source, timeline, options.load_timeout)
            fused = joined(fused, now)
        took = add_span(timeline, f"fuse: {selector.name}, chunks {start + 1} to {stop}", began)
        yield Step(fused, now, stop == len(chunks), took * 1e3)


def fuse_in_rounds(
    session: Session, plan: Plan, selector: Selector, source: KVSource, options: QueryOptions
) -> Outcome:
    """Load until the answer's greedy beginning is sure, or nothing is left to load."""
    decoder, timeline = session.decoder, session.timeline
    rounds: list[Round] = []
    for step in steps(decoder, plan, selector, source, options, timeline):
        began, begun, sure, verdict = time.perf_counter(), None, None, ALL_LOADED
        if not step.last:
            begun = probe(decoder, step.fused, options.max_tokens)
            sure = confidence(begun.log_p)
            verdict = judge(sure, text_of(decoder, begun), options.defer_threshold)
        took = step.milliseconds + add_span(timeline, "is it sure?", began) * 1e3
        rounds.append(_round(step, verdict, sure, took))
        if verdict.enough:
            return Outcome(step.fused, begun, rounds)
    raise AssertionError("a last round is always enough")


def fuse_on(session: Session, behind: CachedPrefix, plan: Plan, selector: Selector, options: QueryOptions) -> Outcome:
    """Fuse what a plan has behind a prompt that stands, in one pass."""
    decoder, cache, timeline = session.decoder, behind.cache, session.timeline
    if isinstance(cache, StateCache):
        chained = extend_prefix(decoder, cache, plan, selector, options.max_tokens, timeline)
        return Outcome(chained.fused, None, [], chained)
    reserve, patience = options.max_tokens, options.load_timeout
    fused = fuse(decoder, plan, selector, session.source, reserve, timeline, patience, cache)
    return Outcome(fused, None, [])


def probe(decoder: Decoder, fused: Fused, max_tokens: int) -> GreedyPrefix:
    """The answer's greedy beginning over a fused prompt."""
    return greedy_prefix(decoder, fused.cache, fused.logits, min(PROBED, max_tokens))


def text_of(decoder: Decoder, begun: GreedyPrefix) -> str:
    """Return the text of an answer's beginning."""
    text: str = decoder.loaded.tokenizer.decode(list(begun.ids), skip_special_tokens=True)
    return text


def _round(step: Step, verdict: RoundVerdict, sure: float | None, took: float) -> Round:
    new = step.now.plan.chunks
    return Round(
        chunks=tuple(segment.source.chunk_id.hex() for segment in new),
        verdict=verdict,
        confidence=sure,
        bytes_read=step.now.bytes_read,
        milliseconds=took,
        tokens={kind: count for kind, count in step.now.tokens.to_json().items() if kind != "dropped"},
    )
