"""Deferred loading (`--defer`): the best chunks first, and more while the answer is unsure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

import torch

from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.fusion.engine import Fused, FuseTiming, TokenCounts, fuse
from kvtool.core.fusion.loader import KVSource
from kvtool.core.fusion.plan import Candidate, Plan, as_resident, build_plan, extend_plan
from kvtool.core.fusion.prefix_cache import PrefixFused
from kvtool.core.model.generate import GreedyPrefix, greedy_prefix
from kvtool.core.query.reply import Round

if TYPE_CHECKING:
    from kvtool.core.fusion.selectors.base import Selector
    from kvtool.core.model.decoder import Decoder
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
    """The prompt that the answer is given from. `beginning`: of the answer, which the cache holds already.
    `chained`: what of the prompt will be stored."""

    fused: Fused
    beginning: GreedyPrefix | None = None
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
        began, beginning, sure, enough, reason = time.perf_counter(), None, None, True, "all chunks are loaded"
        if stop < len(chunks):
            beginning = greedy_prefix(decoder, fused.cache, fused.logits, min(_PROBED, options.max_tokens))
            sure, text = (
                confidence(beginning.log_p),
                session.tokenizer.decode(list(beginning.ids), skip_special_tokens=True),
            )
            enough, reason = judge(sure, text, options.defer_threshold)
        took += add_span(timeline, "is it sure?", began)
        counts = {kind: count for kind, count in now.tokens.to_json().items() if kind != "dropped"}
        ids = tuple(segment.source.chunk_id.hex() for segment in now.plan.chunks)
        rounds.append(Round(ids, enough, reason, sure, now.bytes_read, took * 1e3, counts))
        if enough:
            return Outcome(fused, beginning, rounds)
    raise AssertionError("a last round is always enough")


def extend_fused(
    decoder: Decoder,
    before: Fused,
    chunks: Sequence[Candidate],
    selector: Selector,
    source: KVSource,
    timeline: Timeline | None = None,
    patience: float | None = None,
) -> Fused:
    """Fuse `chunks` into the prompt cache of `before`, one round or several that `joined` has added up, after its own,
    and compute the question again after them. A row sees only earlier rows, so resident rows never change. The result
    counts and times the new rows, and a ratio is a share of the new chunks."""
    *fused, question = before.plan.segments
    plan = extend_plan(as_resident(fused), chunks, question.ids)
    return fuse(decoder, plan, selector, source, timeline=timeline, patience=patience, cache=before.cache)


def joined(before: Fused, now: Fused) -> Fused:
    """Add a round to those before it, as if they were one pass: the whole prompt's plan, with counts and times summed.
    `tokens.rows` counts every computed question, `tokens.fresh` the last one only."""
    start = before.plan.segments[-1].start
    plan = Plan((*before.plan.segments[:-1], *now.plan.segments[1:]))
    fresh = before.tokens.fresh - len(before.plan.segments[-1].ids) + now.tokens.fresh
    names = {**before.reasons, **now.reasons}
    none = plan.mask()
    return Fused(
        logits=now.logits,
        cache=now.cache,
        plan=plan,
        tokens=TokenCounts(
            prompt=plan.length,
            reused=before.tokens.reused + now.tokens.reused,
            recomputed=before.tokens.recomputed + now.tokens.recomputed,
            fresh=fresh,
            rows=tuple(a + b for a, b in zip(before.tokens.rows, now.tokens.rows, strict=True)),
            dropped=plan.dropped,
        ),
        timing=FuseTiming(*map(sum, zip(astuple(before.timing), astuple(now.timing), strict=True))),
        bytes_read=before.bytes_read + now.bytes_read,
        recomputed=_spliced(before.recomputed, now.recomputed, start),
        shifted=before.shifted + now.shifted,
        reasons={name: _spliced(before.reasons.get(name, none), now.reasons.get(name, none), start) for name in names},
    )


def _spliced(before: torch.Tensor, now: torch.Tensor, start: int) -> torch.Tensor:
    return torch.cat([before[:start], now[start:]])


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
