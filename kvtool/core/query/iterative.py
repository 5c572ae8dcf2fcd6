"""Deferred loading (`--defer`): the best chunks first, and more while the answer is unsure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtool.core.common.timeline import add_span
from kvtool.core.fusion.engine import Fused, extend_fused, fuse, joined
from kvtool.core.fusion.plan import Plan, build_plan
from kvtool.core.fusion.prefix_cache import PrefixFused
from kvtool.core.fusion.source import KVSource
from kvtool.core.model.generate import GreedyPrefix, greedy_prefix
from kvtool.core.query.reply import Round

if TYPE_CHECKING:
    from kvtool.core.fusion.selectors.base import Selector
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.session.session import Session


_PROBED = 8  # answer tokens whose probability says how sure a round is

# What models say in place of an answer; in lower case. An answer that begins with one of them is no answer.
_NOT_THERE = (
    *("not mentioned", "not specified", "not provided", "not stated", "not found", "not given", "no information"),
    *("does not mention", "do not mention", "does not say", "doesn't say", "does not provide", "do not provide"),
    *("cannot be determined", "i don't know", "i do not know", "i'm sorry", "i am sorry", "unknown", "unanswerable"),
    *("알 수 없", "찾을 수 없", "언급되지 않", "나와 있지 않", "정보가 없", "모르겠"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The prompt that the answer is given from. `begun`: the answer's beginning, which the cache holds already.
    `chained`: what of the prompt will be stored."""

    fused: Fused
    begun: GreedyPrefix | None = None
    rounds: list[Round] = field(default_factory=list)
    chained: PrefixFused | None = None


def fuse_in_rounds(
    session: Session, plan: Plan, selector: Selector, source: KVSource, options: QueryOptions
) -> Outcome:
    """Load until the answer's greedy beginning is sure, or nothing is left to load."""
    decoder, timeline, chunks = session.decoder, session.timeline, plan.chunks
    fused: Fused | None = None
    rounds: list[Round] = []
    for start, stop in options.rounds(len(chunks)):
        began, wanted = time.perf_counter(), [segment.source for segment in chunks[start:stop]]
        if fused is None:
            first = build_plan(plan.segments[0].source, wanted, plan.segments[-1].ids)
            room = plan.length - first.length + options.max_tokens  # for all chunks and the answer from the start
            now = fused = fuse(decoder, first, selector, source, room, timeline, options.load_timeout)
        else:
            now = extend_fused(decoder, fused, wanted, selector, source, timeline, options.load_timeout)
            fused = joined(fused, now)
        took = add_span(timeline, f"fuse: {selector.name}, chunks {start + 1} to {stop}", began)
        began, begun, sure, enough, reason = time.perf_counter(), None, None, True, "all chunks are loaded"
        if stop < len(chunks):
            begun = greedy_prefix(decoder, fused.cache, fused.logits, min(_PROBED, options.max_tokens))
            sure, text = confidence(begun.log_p), session.tokenizer.decode(list(begun.ids), skip_special_tokens=True)
            enough, reason = judge(sure, text, options.defer_threshold)
        took += add_span(timeline, "is it sure?", began)
        counts = {kind: count for kind, count in now.tokens.to_json().items() if kind != "dropped"}
        ids = tuple(segment.source.chunk_id.hex() for segment in now.plan.chunks)
        rounds.append(Round(ids, enough, reason, sure, now.bytes_read, took * 1e3, counts))
        if enough:
            return Outcome(fused, begun, rounds)
    raise AssertionError("a last round is always enough")


def confidence(log_p: Sequence[float]) -> float:
    return math.exp(math.fsum(log_p) / len(log_p))


def judge(sure: float, beginning: str, threshold: float) -> tuple[bool, str]:
    """Decide whether an answer is given, and why: from its beginning, and from how sure the model is of it."""
    text = beginning.lower()
    if (phrase := next((phrase for phrase in _NOT_THERE if phrase in text), None)) is not None:
        return False, f"it says that the answer is not there: {phrase!r}"
    if sure < threshold:
        return False, f"unsure: {sure:.3f} is below {threshold:.3f}"
    return True, f"sure: {sure:.3f} is at least {threshold:.3f}"
