"""The controller of `--fusion auto`: choose mode, recompute ratio and codec level for a prompt.

It follows CacheBlend (arXiv 2405.16444, section 5.1), and decides from measured speeds. What differs from the paper:

- The paper weighs r · Prefill(L) against the loading time. Here every pass of a mode is counted with its rows and the
  keys they see (fusion/cost.py), and only passes that overlap with loading are overlapped with it. A mode that ranks by
  the question's attention over the whole reused cache hides the question's own pass behind loading, but not the
  recompute after it.
- Modes that lose nothing are choices, too: they win where they are as fast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtool.core.codec.levels import known
from kvtool.core.fusion.options import selector_for
from kvtool.core.fusion.plan import CACHED, PromptRows, Span, Speeds
from kvtool.core.fusion.selectors import SELECTORS, WEIGHED
from kvtool.core.query.prompt import PromptLayout, lay_out_at
from kvtool.core.session.identity import allowed_levels

if TYPE_CHECKING:
    from kvtool.core.fusion.plan import Plan
    from kvtool.core.fusion.selectors.base import Selector
    from kvtool.core.query.options import LoadOptions, QueryOptions
    from kvtool.core.session.session import Session


def choose(
    session: Session, layout: PromptLayout, options: QueryOptions
) -> tuple[PromptLayout, QueryOptions, Decision]:
    """Choose the mode, ratio and level that a prompt is answered in soonest. Raises GateError. Deciding counts in the
    TTFT; measuring the machine does not, and is reported as `profile`."""
    if layout.plan.cached and not options.force:
        session.check_gate()
    started = time.perf_counter()
    laid_out = _at_levels(session, layout, options)
    lossless = [selector_for(options, mode) for mode, kind in SELECTORS.items() if kind.lossless]
    selector = selector_for(options, WEIGHED)
    spans = {level: spans_of(session, variant.plan) for level, variant in laid_out.items()}
    levels = known(span.level for variant in spans.values() for span in variant)
    chunk_ids = [segment.source.chunk_id for segment in layout.plan.cached]
    laid_out_at = time.perf_counter()
    speeds = session.speeds.speeds(levels, chunk_ids)
    measured = time.perf_counter()
    before_s = layout.retrieve_ms / 1e3 + laid_out_at - started
    decision = decide(spans, speeds, selector, lossless, before_s)
    decide_ms = (time.perf_counter() - measured + laid_out_at - started) * 1e3
    layout = laid_out[decision.level] if decision.level is not None else layout
    ratio = options.ratio if decision.ratio is None else decision.ratio
    times = {"decide": decide_ms, "profile": (measured - laid_out_at) * 1e3}
    return layout, replace(options, fusion=decision.fusion, ratio=ratio), replace(decision, timing_ms=times)


def spans_of(session: Session, plan: Plan) -> list[Span]:
    return [Span.of(segment, session.holds(segment)) for segment in plan.segments]


def _at_levels(session: Session, layout: PromptLayout, options: LoadOptions) -> dict[str, PromptLayout]:
    """Return the prompt at each level that may be read, the finest first, and as `--level auto` would read a mixed
    store."""
    cached = layout.plan.cached_chunks
    used = {segment.source.level for segment in cached}
    own = used.pop() if len(used) == 1 else "auto"
    if options.level != "auto" or not cached:
        return {own or "auto": layout}
    allowed = []
    for chunk_id in {segment.source.chunk_id for segment in cached}:
        levels = session.store.levels(chunk_id)
        allowed.append(allowed_levels(levels, session.losses.of(chunk_id, levels), options.max_loss))
    common = [level for level in known(allowed[0]) if all(level in levels for levels in allowed)]
    others = {level: lay_out_at(session, layout, options, level) for level in common if level != own}
    names = known([*others, own])
    return {name: others.get(name, layout) for name in (*names, *(["auto"] if own == "auto" else []))}


# Expectations that differ by less are the same: two runs of one prompt differ by more. So quality decides between them,
# and a recompute that adds at most this share of the loading time counts as hidden.
NOISE = 0.05


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the controller. `ratio`: None where the mode has none. `level`: None where nothing is read; `auto`:
    each chunk's own. `expected_ms`: TTFT by mode. `level_ms`: TTFT of the recompute mode at its least ratio, by
    level. `timing_ms`: of the decision."""

    fusion: str
    ratio: float | None
    level: str | None
    expected_ms: dict[str, float]
    level_ms: dict[str, float] = field(default_factory=dict)
    timing_ms: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        chosen = {"fusion": self.fusion, "ratio": self.ratio, "level": self.level}
        times = {"expected_ms": self.expected_ms, "level_ms": self.level_ms}
        return chosen | {name: {of: round(ms, 3) for of, ms in took.items()} for name, took in times.items()}


def decide(
    choices: Mapping[str, Sequence[Span]],
    speeds: Speeds,
    selector: Selector,
    lossless: Sequence[Selector],
    before_s: float = 0.0,
) -> Decision:
    """Choose the level with the least expected TTFT at the least ratio; a lossless mode where one is as fast; else the
    largest ratio whose recompute hides behind loading. `choices`: the prompt at each level that may be read, the finest
    first. `selector`: at the least allowed share. `before_s`: seconds that the TTFT already counts."""
    prompts = {level: PromptRows(spans, speeds) for level, spans in choices.items()}
    at_floor = {level: selector.expected_seconds(prompt) for level, prompt in prompts.items()}
    level = next(level for level in prompts if at_floor[level] <= min(at_floor.values()) * (1 + NOISE))
    prompt = prompts[level]
    options = _lossless(prompts, lossless)
    best = min(options, key=lambda option: option.seconds)
    keep = best.seconds <= at_floor[level] * (1 + NOISE)
    chosen = selector if keep else selector.with_amount(hidden_ratio(prompt, selector))
    expected = {mode.name: min(option.seconds for option in options if option.mode == mode.name) for mode in lossless}
    expected[chosen.name] = chosen.expected_seconds(prompt)
    return Decision(
        fusion=best.mode if keep else chosen.name,
        ratio=None if keep else chosen.amount,
        level=best.level if keep else level,
        expected_ms={mode: (before_s + took) * 1e3 for mode, took in expected.items()},
        level_ms={name: (before_s + took) * 1e3 for name, took in at_floor.items()},
    )


class _Option(NamedTuple):
    mode: str
    level: str | None
    seconds: float


def _lossless(prompts: Mapping[str, PromptRows], modes: Sequence[Selector]) -> list[_Option]:
    """Return the lossless options; of two equally fast ones the first is preferred. A mode that ignores the cache would
    leave a missing chunk missing; a mode that uses it stores what it computes."""
    holes = next(iter(prompts.values())).holes
    options = []
    for mode in sorted(modes, key=lambda selector: selector.uses_cache is not holes):
        for level, prompt in list(prompts.items())[: None if mode.uses_cache else 1]:
            options.append(_Option(mode.name, level if mode.uses_cache else None, mode.expected_seconds(prompt)))
    return options


def hidden_ratio(prompt: PromptRows, selector: Selector) -> float:
    """Return the largest ratio, from the selector's own to 1, that is expected to add at most `NOISE` of the
    loading time."""
    floor = selector.amount

    def seconds(ratio: float) -> float:
        return selector.with_amount(ratio).expected_seconds(prompt)

    allowed = seconds(floor) + NOISE * prompt.load(*CACHED).seconds
    if not prompt.context or seconds(1.0) <= allowed:
        return max(floor, 1.0) if prompt.context else floor
    least, high = math.ceil(round(floor * prompt.context, 6)), prompt.context
    low = least
    while high - low > 1:  # `low` tokens hide, `high` do not
        middle = (low + high) // 2
        if seconds(middle / prompt.context) <= allowed:
            low = middle
        else:
            high = middle
    return floor if low == least else max(floor, math.floor(low / prompt.context * 1e4) / 1e4)
