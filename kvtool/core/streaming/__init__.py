"""Fetching from a shared store under a time objective: the levels of chunks, the link's throughput, and the task."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Part:
    """The records of one chunk at one stored level, in bytes; they are fetched as a whole or not at all."""

    level: str
    size: int


@dataclass(frozen=True, slots=True)
class Rung:
    level: str
    loss: float  # nats a token of the answer; 0 for `raw` and `lossless`
    parts: tuple[Part, ...]  # all that must be there: coarser levels that a nested one refines, and its own

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def absent(self, held: Set[str]) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.level not in held)


@dataclass(frozen=True, slots=True)
class Ladder:
    chunk: int  # its number in the prompt
    tokens: int
    rungs: tuple[Rung, ...]  # with every step the loss falls and the size grows; empty: nothing is stored

    @classmethod
    def of(cls, chunk: int, tokens: int, rungs: Iterable[Rung]) -> Ladder:
        """Make a ladder of rungs in any order. One as large as another that loses no more is never worth fetching."""
        kept: list[Rung] = []
        for rung in sorted(rungs, key=lambda rung: (rung.loss, rung.size)):
            if not kept or rung.size < kept[-1].size:
                kept.append(rung)
        return cls(chunk, tokens, tuple(reversed(kept)))

    def reached(self, held: Set[str]) -> int:
        """The finest rung whose parts are all there; -1: none."""
        whole = (number for number, rung in enumerate(self.rungs) if not rung.absent(held))
        return max(whole, default=-1)


_WINDOW = 5  # transfers that the harmonic mean is taken over, as players of streamed video take it


class Harmonic:
    """Throughput of a link: the harmonic mean of the last few transfers' rates, so that a slow one weighs most."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, size: float, seconds: float) -> None:
        """Note a transfer of `size` bytes, waiting for its first byte included."""
        if size and seconds > 0:
            self._rates.append(size / seconds)

    @property
    def bytes_per_second(self) -> float | None:
        """The expected throughput of the next transfer; None before the first."""
        return len(self._rates) / sum(1 / rate for rate in self._rates) if self._rates else None


@dataclass(frozen=True, slots=True)
class Fetch:
    chunk: int
    level: str
    parts: tuple[Part, ...]
    estimated_bytes_per_second: float | None  # at the request; None: no estimate yet

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class Task:
    """A fetch task for one question. `compute`: seconds of the pass after streaming if these chunks are computed from
    their text; a chunk may add more the more others there are, never less. `decode`: seconds to decode so many tokens
    at a level. `alone`: seconds to compute a chunk without others, during the fetching; `math.inf`: it needs what
    precedes it."""

    ladders: tuple[Ladder, ...]  # the most relevant chunk first; only levels that are allowed
    compute: Callable[[frozenset[int]], float]
    objective: float  # seconds from the question's start to the first token
    decode: Callable[[int, str], float] = lambda tokens, level: 0.0
    alone: Callable[[int], float] = lambda chunk: math.inf


@dataclass(frozen=True, slots=True)
class Flight:
    fetch: Fetch
    at: float  # of the request
    decision: str


def decision_row(chunk: int, decision: str, **facts: object) -> dict[str, Any]:
    """A row of `stream` (`kvtool help json`); without more facts, of a chunk that is computed from its text."""
    unknown = dict.fromkeys(("estimated_mbps", "measured_mbps", "fetch_ms", "compute_ms"))
    return {"chunk": chunk, "level": None, **unknown, "bytes": 0, "decision": decision} | facts


def mbps(bytes_per_second: float | None) -> float | None:
    return None if bytes_per_second is None else bytes_per_second * 8 / 1e6
