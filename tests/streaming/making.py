"""Tasks, traces and drivers for the tests of streaming."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from kvtool.core.streaming import Fetch, Ladder, Part, Rung, Task
from kvtool.core.streaming.policy import Policy
from samples.benchmarks.streaming.predictors import PREDICTORS
from samples.benchmarks.streaming.traces import LinkTrace

NESTED = ("4", "3", "2", "1")
LOSSES = {"4": 0.08, "3": 0.01, "2": 0.002, "1": 0.0006, "lossless": 0.0}
MB = 1_000_000


def nested(sizes: dict[str, int]) -> list[Rung]:
    """Rungs of own parts of these sizes; all but `lossless` refine the coarser ones."""
    parts = [Part(level, sizes[level]) for level in NESTED if level in sizes]
    rungs = [Rung(one.level, LOSSES[one.level], tuple(parts[: n + 1])) for n, one in enumerate(parts)]
    if "lossless" in sizes:
        rungs.append(Rung("lossless", 0.0, (Part("lossless", sizes["lossless"]),)))
    return rungs


def ladder(chunk: int = 0, tokens: int = 1000, **sizes: int) -> Ladder:
    """Sizes in MB by level, `l4=1`; without any: 1, 1, 2, 3 and 40 for `lossless`."""
    given = sizes or {"l4": 1, "l3": 1, "l2": 2, "l1": 3, "lossless": 40}
    return Ladder.of(chunk, tokens, nested({_level(name): size * MB for name, size in given.items()}))


def _level(name: str) -> str:
    return name if name == "lossless" else name[1:]


def task(
    chunks: int = 4,
    objective: float = 1.0,
    text: float = 0.2,
    question: float = 0.05,
    decode: Callable[[int, str], float] = lambda tokens, level: 0.0,
    **sizes: int,
) -> Task:
    """Chunks alike; `text` seconds of compute each."""
    ladders = tuple(ladder(chunk, **sizes) for chunk in range(chunks))
    return Task(ladders, lambda texts: question + text * len(texts), objective, decode)


def adaptive(one: Task, predictor: str = "last") -> Policy:
    """The policy without a processor: nothing is computed before the pass."""
    return both(replace(one, alone=lambda chunk: math.inf), predictor)


def both(one: Task, predictor: str = "last") -> Policy:
    return Policy(one, PREDICTORS[predictor]())


def steady(mbps: float, latency_ms: float = 0.0) -> LinkTrace:
    return LinkTrace("steady", "steady", ((0.0, mbps),), latency_ms)


@st.composite
def ladders(draw: Any, chunk: int) -> Ladder:
    levels = draw(st.sets(st.sampled_from([*NESTED, "lossless"])))
    sizes = {level: draw(st.integers(1, 40 * MB)) for level in sorted(levels)}
    return Ladder.of(chunk, draw(st.integers(1, 2000)), nested(sizes))


@st.composite
def tasks(draw: Any) -> Task:
    """Chunks of random levels; compute and decode of random seconds a token."""
    count = draw(st.integers(1, 6))
    made = tuple(draw(ladders(chunk)) for chunk in range(count))
    tokens = {one.chunk: one.tokens for one in made}
    question, token = draw(st.floats(0, 0.1)), draw(st.floats(0, 5e-4))
    crossed = draw(st.sampled_from((0.0, 1e-8)))  # seconds a pair of tokens: more text is dearer text
    decode = draw(st.sampled_from((0.0, 1e-6, 5e-5, 2e-4)))

    def compute(texts: frozenset[int]) -> float:
        total = sum(tokens[chunk] for chunk in texts)
        return question + token * total + crossed * total * total

    objective = draw(st.floats(0.01, 4))
    return Task(made, compute, objective, lambda count, level: decode * count)


@st.composite
def traces(draw: Any) -> LinkTrace:
    gaps = draw(st.lists(st.floats(0.01, 1), max_size=5))
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    rates = [draw(st.floats(0, 10_000)) for _ in gaps] + [draw(st.floats(1, 10_000))]
    latency, jitter = draw(st.floats(0, 200)), draw(st.floats(0, 100))
    return LinkTrace(
        "random", "random", tuple(zip(times, rates, strict=True)), latency, jitter, draw(st.integers(0, 9))
    )


@dataclass
class Watched:
    policy: Policy
    asked: list[Fetch] = field(default_factory=list)
    ended: list[tuple[Fetch, float, bool, float]] = field(default_factory=list)  # with the limit at that time

    def next(self, now: float) -> Fetch | None:
        fetch = self.policy.next(now)
        if fetch is not None:
            self.asked.append(fetch)
        return fetch

    def done(self, fetch: Fetch, started: float, ended: float, arrived: bool) -> None:
        self.ended.append((fetch, ended, arrived, self.policy.give_up_at(fetch)))
        self.policy.done(fetch, started, ended, arrived)

    def give_up_at(self, fetch: Fetch) -> float:
        return self.policy.give_up_at(fetch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)
