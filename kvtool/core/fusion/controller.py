"""The controller (CacheBlend, arXiv 2405.16444, section 5.1): which mode, which ratio, which level for this prompt.

Decisions only, from measured speeds; nothing here needs torch. What differs from the paper:

- The paper weighs r · Prefill(L) against the loading time. Here every pass of a mode is counted with its rows and the
  keys they see, and only passes that run beside loading are overlapped with it. `union` and `infoflow` rank by the
  question's attention over the whole reused cache: the question's own pass hides behind loading, the recompute after it
  does not. `blend` hides all of it.
- Full prefill and prefix caching are choices, too: they lose nothing, so they win where they are as fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvtool.core.fusion.speeds import Load, Speeds

Recompute = Literal["union", "infoflow", "blend"]

# Expectations that differ by less are the same: two runs of one prompt differ by more. So quality decides between them,
# and a recompute that adds no more than this share of the loading time counts as hidden.
NOISE = 0.05
_COMPUTED = ("fresh", "hole")  # what no mode reuses: the question and what is not stored


@dataclass(frozen=True, slots=True)
class Span:
    """A segment of the prompt: its tokens, its status (fusion/plan), the level it is read at, and whether it is held in
    memory, so that nothing is to be read."""

    tokens: int
    status: str
    level: str | None = None
    held: bool = False


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


class Prompt:
    """Row counts of a laid-out prompt.

    Parameters
    ----------
    spans : in prompt order, the prompt's beginning first, the question last.
    speeds : what was measured. A level that could not be is one whose records cannot be read: these are holes.
    """

    def __init__(self, spans: Sequence[Span], speeds: Speeds) -> None:
        self._speeds = speeds
        start, leading = 0, True
        self._rows: dict[str, int] = {}
        self._keys: dict[str, int] = {}
        self._stored: dict[str, dict[str, int]] = {}  # tokens by status, by level
        self.context = 0
        for number, span in enumerate(spans):
            cached = span.status in ("hit", "exact") and span.level in speeds.loads
            status = span.status if cached or span.status == "fresh" else "hole"
            leading = leading and status == "exact"
            name = "leading" if leading else status
            self._rows[name] = self._rows.get(name, 0) + span.tokens
            self._keys[name] = self._keys.get(name, 0) + _keys_seen(start, span.tokens)
            if cached and span.level is not None:
                levels = self._stored.setdefault(name, {})
                levels[span.level] = levels.get(span.level, 0) + (0 if span.held else span.tokens)
                self.context += span.tokens if number else 0
            start += span.tokens
        self.length = start
        self.holes = any(span.status == "miss" and span.tokens for span in spans)

    @property
    def hits(self) -> int:
        """Cached tokens that are not what full prefill gives: those worth recomputing."""
        return self._rows.get("hit", 0)

    def load(self, *names: str) -> Load:
        """Reading the stored spans of these kinds (`leading`, `exact`, `hit`)."""
        tokens: dict[str, int] = {}
        for name in names:
            for level, count in self._stored.get(name, {}).items():
                tokens[level] = tokens.get(level, 0) + count
        return self._speeds.load(tokens)

    def full(self) -> float:
        """Seconds of full prefill."""
        return self._pass((*_COMPUTED, "hit", "exact", "leading"))

    def prefix(self) -> float:
        """Seconds of prefix caching."""
        return self._speeds.beside(self.load("leading"), self._pass((*_COMPUTED, "hit", "exact")))

    def recompute(self, mode: Recompute, ratio: float) -> float:
        """Seconds of a mode that recomputes a share of the cached tokens."""
        chosen = min(math.ceil(round(ratio * self.context, 6)), self.hits)
        load = self.load("leading", "exact", "hit")
        if not chosen:
            return self._speeds.beside(load, self._pass(_COMPUTED))
        if mode == "blend":
            return self._speeds.beside(load, self._pass(_COMPUTED, self._blended(chosen)))
        if ratio >= 1:  # nothing to rank, and what is computed anew is not read
            return self._speeds.beside(self.load("leading", "exact"), self._pass(_COMPUTED, self.hits))
        # The question's pass skips the LM head and sums its attention up instead: taken as dear as any other.
        return self._speeds.beside(load, self._pass(_COMPUTED)) + self._pass(("fresh",), chosen)

    def recomputing(self, rows: int) -> float:
        """Seconds of a mode that knows from the start which hits it recomputes, so many (`reuse`: none; `epic`)."""
        return self._speeds.beside(self.load("leading", "exact", "hit"), self._pass(_COMPUTED, min(rows, self.hits)))

    def _pass(self, names: Sequence[str], hits: float = 0.0) -> float:
        rows, keys = (sum(counts.get(name, 0) for name in names) for counts in (self._rows, self._keys))
        share = hits / self.hits if hits else 0.0
        return self._speeds.passes.seconds(rows + hits, keys + share * self._keys.get("hit", 0))

    def _blended(self, chosen: int) -> float:
        """Mean rows over layers of `blend`'s default schedule: all up to the check layer, then 1.5 times falling to
        once the chosen ones over three layers."""
        layers = self._speeds.layers
        wide, filtering = min(2, layers), min(3, max(layers - 2, 0))
        narrow = layers - wide - filtering
        return (wide * self.hits + filtering * min(1.25 * chosen, self.hits) + narrow * chosen) / layers


def _keys_seen(start: int, tokens: int) -> int:
    """Keys that the rows start … start + tokens - 1 see."""
    return tokens * start + tokens * (tokens + 1) // 2


def decide(
    choices: Mapping[str, Sequence[Span]],
    speeds: Speeds,
    floor: float,
    mode: Recompute = "union",
    before_s: float = 0.0,
) -> Decision:
    """Choose for one prompt.

    The level with the least expected TTFT at the floor (a tie: the finer one); full prefill or prefix caching where
    these are expected to be as fast; else the largest ratio whose recompute hides behind loading.

    Parameters
    ----------
    choices : the prompt as laid out at each level that may be read, the finest first; not empty.
    floor : the least ratio.
    before_s : seconds that the TTFT already counts (retrieval).
    """
    prompts = {level: Prompt(spans, speeds) for level, spans in choices.items()}
    at_floor = {level: prompt.recompute(mode, floor) for level, prompt in prompts.items()}
    level = next(one for one in prompts if at_floor[one] <= min(at_floor.values()) * (1 + NOISE))
    prompt = prompts[level]
    lossless = _lossless(prompts)
    name, read, seconds = min(lossless, key=lambda one: one[2])
    keep = seconds <= at_floor[level] * (1 + NOISE)
    ratio = floor if keep else hidden_ratio(prompt, mode, floor)
    expected = {one: min(took for other, _, took in lossless if other == one) for one in ("full", "prefix")}
    expected[mode] = prompt.recompute(mode, ratio)
    say = _Reasons(prompts, prompt, level, mode, floor, ratio)
    return Decision(
        fusion=name if keep else mode,
        ratio=None if keep else ratio,
        level=read if keep else level,
        expected_ms={one: (before_s + took) * 1e3 for one, took in expected.items()},
        level_ms={one: (before_s + took) * 1e3 for one, took in at_floor.items()},
        reasons=say.all(at_floor, expected, name if keep else None),
    )


def _lossless(prompts: Mapping[str, Prompt]) -> list[tuple[str, str | None, float]]:
    """(mode, level, seconds) of what loses nothing; the first of those as fast is the better one.

    Full prefill ignores the cache, so it would leave a hole a hole: prefix caching stores what it computes.
    """
    first = next(iter(prompts.values()))
    full: tuple[str, str | None, float] = ("full", None, first.full())
    prefix = [("prefix", level, prompt.prefix()) for level, prompt in prompts.items()]
    return [*prefix, full] if first.holes else [full, *prefix]


def hidden_ratio(prompt: Prompt, mode: Recompute, floor: float) -> float:
    """The largest ratio, `floor` … 1, that is expected to add no more than `NOISE` of the loading time."""
    load = prompt.load("leading", "exact", "hit").seconds
    allowed = prompt.recompute(mode, floor) + NOISE * load
    if not prompt.context or prompt.recompute(mode, 1.0) <= allowed:
        return max(floor, 1.0) if prompt.context else floor
    least, high = math.ceil(round(floor * prompt.context, 6)), prompt.context
    low = least
    while high - low > 1:  # `low` tokens hide, `high` do not
        middle = (low + high) // 2
        if prompt.recompute(mode, middle / prompt.context) <= allowed:
            low = middle
        else:
            high = middle
    return floor if low == least else max(floor, math.floor(low / prompt.context * 1e4) / 1e4)


@dataclass(frozen=True, slots=True)
class _Reasons:
    """The decision in words."""

    prompts: Mapping[str, Prompt]
    prompt: Prompt
    level: str
    mode: str
    floor: float
    ratio: float

    def all(
        self, at_floor: Mapping[str, float], expected: Mapping[str, float], lossless: str | None
    ) -> tuple[str, ...]:
        load = self.prompt.load("leading", "exact", "hit").seconds
        lines = [f"{self.prompt.length} tokens, {self.prompt.context} of chunks in the cache: loading them {_ms(load)}"]
        if len(self.prompts) > 1:
            levels = ", ".join(f"{level} {_ms(took)}" for level, took in at_floor.items())
            lines.append(f"{self.mode} at {self.floor:.0%} by level: {levels}; level {self.level} is read")
        lines.append("expected: " + ", ".join(f"{name} {_ms(took)}" for name, took in expected.items()))
        if lossless:
            lines.append(f"{lossless} is as fast as {self.mode} at its least ratio, and loses nothing")
        elif self.ratio > self.floor:
            lines.append(f"recompute hides behind loading up to {self.ratio:.1%}")
        else:
            lines.append(f"recompute does not hide behind loading: the least ratio, {self.floor:.0%}")
        return tuple(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
