"""`--fusion auto`: the controller chooses a mode, a ratio and a level for a prompt that is laid out."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool.core.codec.levels import known
from kvtool.core.fusion.controller import Decision, decide
from kvtool.core.fusion.cost import Span
from kvtool.core.fusion.read_set import ReadSet
from kvtool.core.fusion.selectors import SELECTORS, WEIGHED, selector_for
from kvtool.core.query.layout import Asked, lay_out_at
from kvtool.core.session.levels import allowed_levels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtool.core.fusion.plan import Plan
    from kvtool.core.fusion.selectors.base import Selector
    from kvtool.core.query.layout import Asked
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.session.session import Session


@dataclass(frozen=True, slots=True)
class Choice:
    """What the controller chose: a prompt with its options, and the milliseconds that measuring and deciding took."""

    asked: Asked
    options: QueryOptions
    decision: Decision
    profile_ms: float
    decide_ms: float


def choose(session: Session, asked: Asked, options: QueryOptions) -> Choice:
    """The mode, the ratio and the level that a prompt is answered in soonest.

    Deciding counts in the TTFT; measuring the machine does not, and is reported as `profile`.

    Raises
    ------
    GateError : the gate refuses cached modes, whichever would be chosen.
    """
    if not options.force:
        session.check_gate()
    started = time.perf_counter()
    laid_out = _at_levels(session, asked, options)
    lossless = [selector_for(options, mode) for mode, kind in SELECTORS.items() if kind.lossless]
    selector = selector_for(options, WEIGHED)
    spans = {level: spans_of(session, variant.plan, [selector, *lossless]) for level, variant in laid_out.items()}
    levels = known(span.level for variant in spans.values() for span in variant)
    chunk_ids = [segment.source.chunk_id for segment in asked.plan.cached]
    laid_out_at = time.perf_counter()
    speeds = session.speeds.speeds(levels, chunk_ids)
    measured = time.perf_counter()
    before_s = asked.retrieve_ms / 1e3 + laid_out_at - started
    decision = decide(spans, speeds, selector, lossless, before_s)
    decide_ms = (time.perf_counter() - measured + laid_out_at - started) * 1e3
    asked = laid_out[decision.level] if decision.level is not None else asked
    ratio = options.ratio if decision.ratio is None else decision.ratio
    chosen = replace(options, fusion=decision.fusion, ratio=ratio)
    return Choice(asked, chosen, decision, (measured - laid_out_at) * 1e3, decide_ms)


def spans_of(session: Session, plan: Plan, modes: Sequence[Selector]) -> list[Span]:
    """A prompt's segments, with what each mode reads of them where some layers look through a window; loads no
    model."""
    windows, shares = session.windows, [dict[str, float]() for _ in plan.segments]
    if any(window is not None for window in windows):
        for mode in modes:
            for share, of_mode in zip(shares, ReadSet.of(plan, mode, windows).shares(plan), strict=True):
                share[mode.name] = of_mode
    pairs = zip(plan.segments, shares, strict=True)
    return [Span.of(segment, session.holds(segment), share) for segment, share in pairs]


def _at_levels(session: Session, asked: Asked, options: QueryOptions) -> dict[str, Asked]:
    """The prompt at each level that may be read, the finest first, and as `--level auto` would read a mixed store."""
    cached = asked.plan.cached_chunks
    used = {segment.source.level for segment in cached}
    own = used.pop() if len(used) == 1 else "auto"
    if options.level != "auto" or not cached:
        return {own or "auto": asked}
    allowed = []
    for chunk_id in {segment.source.chunk_id for segment in cached}:
        levels = session.store.levels(chunk_id)
        allowed.append(allowed_levels(levels, session.losses.of(chunk_id, levels), options.max_loss))
    common = [level for level in known(allowed[0]) if all(level in levels for levels in allowed)]
    others = {level: lay_out_at(session, asked, options, level) for level in common if level != own}
    names = known([*others, own])
    return {name: others.get(name, asked) for name in (*names, *(["auto"] if own == "auto" else []))}
