"""Traces of named classes, the same on every machine: what a link between a cache tier and a GPU may do to a request.

Rates span three powers of ten and the changes fall within the first second, while a context of some ten thousand tokens
is under way. They are made, not recorded.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from kvtool.lab.simulator.traces import LinkTrace

_LATENCY_MS = 2.0  # of the classes that are not about it: within a data centre
_SECONDS = 12.0  # for which bandwidths that change all the time are drawn


def generate() -> list[LinkTrace]:
    """All of them, class by class."""
    return [*_steady(), *_drop(), *_recovery(), *_outage(), *_sawtooth(), *_walk(), *_noise(), *_latency()]


def drop_in_mid_transfer() -> LinkTrace:
    """3 Gbit/s, and 1 Gbit/s from 0.1 s on."""
    return _trace("3000-1000", "drop", (0.0, 3000), (0.1, 1000))


def _trace(
    name: str, kind: str, *steps: tuple[float, float], jitter: float = 0.0, latency: float = _LATENCY_MS
) -> LinkTrace:
    return LinkTrace(f"{kind}-{name}", kind, steps, latency, jitter, seed=len(name))


def _steady() -> Iterator[LinkTrace]:
    for mbps in (100, 300, 1000, 3000, 10_000):
        yield _trace(str(mbps), "steady", (0.0, mbps))


def _drop() -> Iterator[LinkTrace]:
    yield drop_in_mid_transfer()
    for second, high, low in ((0.05, 10_000, 500), (0.15, 3000, 300), (0.3, 2000, 200), (0.2, 1000, 100)):
        yield _trace(f"{high}-{low}", "drop", (0.0, high), (second, low))


def _recovery() -> Iterator[LinkTrace]:
    for second, low, high in ((0.3, 300, 3000), (0.2, 100, 1000), (0.5, 500, 10_000)):
        yield _trace(f"{low}-{high}", "recovery", (0.0, low), (second, high))
    yield _trace("dip", "recovery", (0.0, 3000), (0.1, 200), (0.4, 3000))


def _outage() -> Iterator[LinkTrace]:
    for start, seconds, mbps in ((0.05, 0.15, 3000), (0.1, 0.5, 2000), (0.02, 1.5, 5000)):
        yield _trace(f"{seconds:g}s", "outage", (0.0, mbps), (start, 0.0), (start + seconds, mbps))


def _sawtooth() -> Iterator[LinkTrace]:
    for period, low, high in ((0.1, 200, 2000), (0.4, 300, 3000), (1.0, 1000, 10_000)):
        steps = []
        for number in range(int(_SECONDS / period) * 8):
            share = 1 - number % 8 / 7  # high first, then falling
            steps.append((number * period / 8, low + share * (high - low)))
        yield _trace(f"{period:g}s", "sawtooth", *steps)


def _walk() -> Iterator[LinkTrace]:
    for seed, start in enumerate((500, 1000, 2000, 4000)):
        draw, rate = random.Random(seed), float(start)
        steps = []
        for number in range(int(_SECONDS / 0.05)):
            steps.append((number * 0.05, round(rate, 1)))
            rate = min(max(rate * math.exp(draw.gauss(0, 0.35)), 50), 20_000)
        yield _trace(str(start), "walk", *steps)


def _noise() -> Iterator[LinkTrace]:
    for seed, mean in enumerate((500, 1500, 5000)):
        draw = random.Random(100 + seed)
        rates = [round(mean * math.exp(draw.gauss(0, 0.8)), 1) for _ in range(int(_SECONDS / 0.02))]
        yield _trace(str(mean), "noise", *((number * 0.02, rate) for number, rate in enumerate(rates)))


def _latency() -> Iterator[LinkTrace]:
    for mbps, latency, jitter in ((1000, 20.0, 20.0), (3000, 50.0, 50.0), (10_000, 30.0, 0.0), (3000, 5.0, 80.0)):
        yield _trace(f"{mbps}-{latency:g}ms", "latency", (0.0, mbps), latency=latency, jitter=jitter)
