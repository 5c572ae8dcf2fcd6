"""Bandwidth trace of a link over time, and its file.

A trace file is text: `# key: value` lines (name, class, latency_ms, jitter_ms, seed; all may be left out), then rows
`seconds,mbps`, each valid until the next one and the last one for good. A head line `seconds,mbps` may come first.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtool.core.errors import UsageError

_BYTES = 1e6 / 8  # in a megabit
_HEAD = "seconds,mbps"
_NUMBERS = ("latency_ms", "jitter_ms", "seed")


@dataclass(frozen=True, slots=True)
class LinkTrace:
    """A piecewise constant bandwidth.

    Attributes
    ----------
    kind : the class that results are added up by.
    steps : (second from which it is valid, Mbit/s), ascending from 0; the last one above 0.
    latency_ms : from a request to its first byte, on an idle link.
    jitter_ms : at most added to that, uniformly and anew for every request, in the sequence that `seed` begins.
    """

    name: str
    kind: str
    steps: tuple[tuple[float, float], ...]
    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError: these are no bandwidths over time."""
        times = [second for second, _ in self.steps]
        if not times or times[0] != 0 or any(a >= b for a, b in itertools.pairwise(times)):
            raise ValueError("the seconds begin at 0 and rise from row to row")
        numbers = [*times, *(mbps for _, mbps in self.steps), self.latency_ms, self.jitter_ms]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("every number is finite and not negative")
        if self.steps[-1][1] == 0:
            raise ValueError("the last bandwidth holds for good, so it cannot be 0")

    def mbps(self, second: float) -> float:
        """Bandwidth at a moment."""
        return self.steps[self._step(second)][1]

    def _step(self, second: float) -> int:
        """Number of the step that is valid at a moment."""
        return bisect.bisect_right(self.steps, second, key=lambda step: step[0]) - 1

    def end(self, start: float, size: int) -> float:
        """Return when `size` bytes that begin at `start` have passed."""
        left, now = size / _BYTES, start
        for number in range(self._step(start), len(self.steps) - 1):
            mbps, until = self.steps[number][1], self.steps[number + 1][0]
            if mbps and left <= mbps * (until - now):
                return now + left / mbps
            left -= mbps * (until - now)
            now = until
        return now + left / self.steps[-1][1]

    def latencies(self) -> Iterator[float]:
        """Seconds of each request in turn."""
        draw = random.Random(self.seed)
        while True:
            yield (self.latency_ms + draw.random() * self.jitter_ms) / 1e3


def write_trace(trace: LinkTrace, path: Path) -> None:
    """Write a trace's file, which `read_trace` reads."""
    lines = [f"# name: {trace.name}", f"# class: {trace.kind}"]
    lines += [f"# {key}: {getattr(trace, key)!r}" for key in _NUMBERS]
    rows = [f"{second!r},{mbps!r}" for second, mbps in trace.steps]
    path.write_text("\n".join([*lines, _HEAD, *rows]) + "\n", encoding="utf-8")


def read_trace(path: Path) -> LinkTrace:
    """A trace from its file.

    Raises
    ------
    UsageError : the file cannot be read, or a line is no trace's.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the trace {str(path)!r} cannot be read: {error}", "--trace takes a text file") from error
    facts: dict[str, str] = {}
    steps: list[tuple[float, float]] = []
    for number, line in enumerate((one.strip() for one in lines), start=1):
        if line.startswith("#"):
            key, _, value = line.lstrip("# ").partition(":")
            facts[key.strip()] = value.strip()
        elif line and line.replace(" ", "") != _HEAD:
            steps.append(_row(path, number, line))
    try:
        latency, jitter, seed = (float(facts.get(key, "0")) for key in _NUMBERS)
        return LinkTrace(
            facts.get("name", path.stem), facts.get("class", "file"), tuple(steps), latency, jitter, int(seed)
        )
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{str(path)!r} is no trace: {error}", f"rows are {_HEAD}, such as 0,3000") from error


def _row(path: Path, number: int, line: str) -> tuple[float, float]:
    try:
        second, mbps = map(float, line.split(","))
    except ValueError as error:
        raise UsageError(
            f"{str(path)!r}, line {number}: {line!r} is not {_HEAD}", "two numbers, such as 0.5,1000"
        ) from error
    return second, mbps


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
