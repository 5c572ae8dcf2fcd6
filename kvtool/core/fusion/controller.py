"""Choose mode, recompute ratio and codec level for a prompt (the controller of CacheBlend, arXiv 2405.16444, 5.1).

Decisions only, from measured speeds; nothing here needs torch. What differs from the paper:

- The paper weighs r · Prefill(L) against the loading time. Here every pass of a mode is counted with its rows and the
  keys they see (fusion/cost.py), and only passes that run beside loading are overlapped with it. A mode that ranks by
  the question's attention over the whole reused cache hides the question's own pass behind loading, but not the
  recompute after it.
- Modes that lose nothing are choices, too: they win where they are as fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtool.core.fusion.cost import CACHED, PromptRows, Span, Speeds

if TYPE_CHECKING:
    from kvtool.core.fusion.selectors.base import Selector

# Expectations that differ by less are the same: two runs of one prompt differ by more. So quality decides between them,
# and a recompute that adds no more than this share of the loading time counts as hidden.
NOISE = 0.05


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen, and why.

    Attributes
    ----------
    ratio : None where the mode has none.
    level : None where nothing is read; `auto`: each chunk's own.
    expected_ms : TTFT by mode, the recompute mode at the chosen ratio (its floor where another mode was chosen).
    level_ms : TTFT of the recompute mode at its floor, by level.
    reasons : for people, in the order of the decision.
    """

    fusion: str
    ratio: float | None
    level: str | None
    expected_ms: dict[str, float]
    level_ms: dict[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """`controller` of the reply."""
        return {
            "fusion": self.fusion,
            "ratio": self.ratio,
            "level": self.level,
            "expected_ms": {name: round(ms, 3) for name, ms in self.expected_ms.items()},
            "level_ms": {name: round(ms, 3) for name, ms in self.level_ms.items()},
            "notes": list(self.reasons),
        }


def decide(
    choices: Mapping[str, Sequence[Span]],
    speeds: Speeds,
    selector: Selector,
    lossless: Sequence[Selector],
    before_s: float = 0.0,
) -> Decision:
    """Choose for one prompt.

    The level with the least expected TTFT at the least ratio (a tie: the finer one); a mode that loses nothing where
    one is expected to be as fast; else the largest ratio whose recompute hides behind loading.

    Parameters
    ----------
    choices : the prompt as laid out at each level that may be read, the finest first; not empty.
    selector : a mode that recomputes a share, at the least one that is allowed.
    lossless : modes that lose nothing.
    before_s : seconds that the TTFT already counts (retrieval).
    """
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
    lossless_mode = best.mode if keep else None
    return Decision(
        fusion=best.mode if keep else chosen.name,
        ratio=None if keep else chosen.amount,
        level=best.level if keep else level,
        expected_ms={mode: (before_s + took) * 1e3 for mode, took in expected.items()},
        level_ms={name: (before_s + took) * 1e3 for name, took in at_floor.items()},
        reasons=tuple(_notes(prompt, chosen, selector.amount, at_floor, level, expected, lossless_mode)),
    )


@dataclass(frozen=True, slots=True)
class _Option:
    """A mode that loses nothing, and what it is expected to take; `level`: None where nothing is read."""

    mode: str
    level: str | None
    seconds: float


def _lossless(prompts: Mapping[str, PromptRows], modes: Sequence[Selector]) -> list[_Option]:
    """What loses nothing; the first of those as fast is the better one.

    A mode that ignores the cache would leave a hole a hole; one that uses it stores what it computes.
    """
    holes = next(iter(prompts.values())).holes
    options = []
    for mode in sorted(modes, key=lambda selector: selector.uses_cache is not holes):
        for level, prompt in list(prompts.items())[: None if mode.uses_cache else 1]:
            options.append(_Option(mode.name, level if mode.uses_cache else None, mode.expected_seconds(prompt)))
    return options


def hidden_ratio(prompt: PromptRows, selector: Selector) -> float:
    """The largest ratio, from the selector's own to 1, that is expected to add no more than `NOISE` of the loading."""
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


def _notes(
    prompt: PromptRows,
    chosen: Selector,
    floor: float,
    at_floor: Mapping[str, float],
    level: str,
    expected: Mapping[str, float],
    lossless: str | None,
) -> Iterator[str]:
    """The decision in words."""
    load = _ms(prompt.load(*CACHED).seconds)
    yield f"{prompt.length} tokens, {prompt.context} of chunks in the cache: loading them {load}"
    if len(at_floor) > 1:
        levels = ", ".join(f"{other} {_ms(took)}" for other, took in at_floor.items())
        yield f"{chosen.name} at {floor:.0%} by level: {levels}; level {level} is read"
    yield "expected: " + ", ".join(f"{mode} {_ms(took)}" for mode, took in expected.items())
    if lossless:
        yield f"{lossless} is as fast as {chosen.name} at its least ratio, and loses nothing"
    elif chosen.amount > floor:
        yield f"recompute hides behind loading up to {chosen.amount:.1%}"
    else:
        yield f"recompute does not hide behind loading: the least ratio, {floor:.0%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
