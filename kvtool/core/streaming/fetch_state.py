"""State of fetching under a time objective: levels of chunks, throughput of the link, and the base of all policies."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any, Protocol


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

    @property
    def loses(self) -> bool:
        return bool(self.rungs) and self.rungs[0].loss > 0

    def missing(self, held: Set[str], rung: Rung) -> int:
        return sum(part.size for part in rung.absent(held))

    def reached(self, held: Set[str]) -> int:
        """The finest rung whose parts are all there; -1: none."""
        whole = (number for number, rung in enumerate(self.rungs) if not rung.absent(held))
        return max(whole, default=-1)


_WINDOW = 5  # transfers that the harmonic mean is taken over, as players of streamed video take it


class Estimator(Protocol):
    """Bandwidth of a link. One that has seen nothing expects nothing."""

    def observe(self, size: float, seconds: float) -> None:
        """Note a transfer of `size` bytes, waiting for its first byte included."""

    @property
    def bytes_per_second(self) -> float | None:
        """The expected throughput of the next transfer; None before the first."""


class Harmonic:
    """Harmonic mean of the last few transfers' rates: a slow one weighs most, so that it errs on the safe side."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, size: float, seconds: float) -> None:
        if size and seconds > 0:
            self._rates.append(size / seconds)

    @property
    def bytes_per_second(self) -> float | None:
        return len(self._rates) / sum(1 / rate for rate in self._rates) if self._rates else None


DEFAULT_MARGIN = 0.1  # of the estimate that is not counted on


@dataclass(frozen=True, slots=True)
class Fetch:
    chunk: int
    level: str
    parts: tuple[Part, ...]
    estimated_bytes_per_second: float | None  # at the request, before the margin; None: no estimate yet

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
    objective: float | None = None  # seconds from the question's start to the first token
    decode: Callable[[int, str], float] = lambda tokens, level: 0.0
    alone: Callable[[int], float] = lambda chunk: math.inf


@dataclass(frozen=True, slots=True)
class Flight:
    fetch: Fetch
    at: float  # of the request
    decision: str


class Policy(ABC):
    """Base of the policies that say what to fetch, and what to compute meanwhile, with the state that they share.

    A driver (a simulator, or query/streaming.py over a network) keeps to this order:

    1. While fewer than `DEPTH` fetches are outstanding: `next(now)`. Send what it returns; None: nothing to ask for
       now, something may be later if a fetch is outstanding.
    2. While nothing is computed: `compute(now)`. Begin what it returns; what has come is decoded before.
    3. With nothing outstanding and nothing computed after that, streaming is over: compute the chunks of level None
       that are not among `computed` from their text, in the pass.
    4. Wait until a fetch arrives or fails, or its `give_up_at` comes, or the computation ends, or its `stop_at` comes
       (both may change with every report); report that by `done` or `ended` and go to 1. Ask `compute` now and then
       where none of these comes: what a link is expected to do changes while it does nothing.
    """

    def __init__(self, task: Task, estimator: Estimator, margin: float = 0.0) -> None:
        self.task = task
        self._estimator = estimator
        self._margin = margin
        self._ladders = {ladder.chunk: ladder for ladder in task.ladders}
        self._held: dict[int, set[str]] = {chunk: set() for chunk in self._ladders}
        self._reached = dict.fromkeys(self._ladders, -1)  # the rung at which a chunk is held
        self._reaching = dict.fromkeys(self._ladders, -1)  # the same once all that is under way has arrived
        self._missing = frozenset(self._ladders)  # chunks held at no rung
        self._flying: list[Flight] = []
        self._closed: set[int] = set()  # chunks of which nothing more is asked
        self._now = 0.0
        self._last_end = 0.0
        self._decoded_at = 0.0  # when all that is there will be decoded
        self._log: list[dict[str, Any]] = []

    @abstractmethod
    def next(self, now: float) -> Fetch | None:
        """The fetch to start now, `now` seconds after the question's start."""

    def compute(self, now: float) -> int | None:
        """The chunk whose text to compute now, without other chunks; None: none for now."""
        return None

    def ended(self, chunk: int, seconds: float, now: float, whole: bool) -> None:
        """Note the end of a chunk's computation, in seconds without decoding. Not `whole`: it failed, or was
        stopped."""
        raise NotImplementedError("nothing was to be computed")

    def stop_at(self, chunk: int) -> float | None:
        """When waiting for its computation should end; None: never."""
        return None

    @property
    def computed(self) -> frozenset[int]:
        return frozenset()

    @property
    def levels(self) -> dict[int, str | None]:
        """The level that each chunk has been fetched at; None: its text is all there is."""
        return {chunk: self._level(chunk) for chunk in self._ladders}

    @property
    def log(self) -> list[dict[str, Any]]:
        """Decisions in the order in which they ended, last the chunks that were never fetched."""
        told = {row["chunk"] for row in self._log} | {flight.fetch.chunk for flight in self._flying}
        return self._log + [text_row(chunk, "text") for chunk in self._ladders if chunk not in told]

    def give_up_at(self, fetch: Fetch) -> float | None:
        """When waiting for a fetch should end; None: never, unless what it refines is lost or was computed."""
        return self._now if fetch.chunk in self._closed else None

    def done(self, fetch: Fetch, started: float, ended: float, arrived: bool) -> None:
        """Note the end of a fetch, which started after the one before it on the same link. Not `arrived`: it failed, or
        was given up."""
        flight = next(flight for flight in self._flying if flight.fetch == fetch)
        self._flying.remove(flight)
        self._now = self._last_end = max(self._now, ended)
        decision = flight.decision
        if arrived:
            self._held[fetch.chunk] |= {part.level for part in fetch.parts}
            self._count(fetch.chunk)
            decode = self.task.decode(self._ladders[fetch.chunk].tokens, fetch.level)
            self._decoded_at = max(self._decoded_at, ended) + decode
            self._estimator.observe(fetch.size, ended - started)
        else:
            self._closed.add(fetch.chunk)
            self._count(fetch.chunk)
            decision = f"gave up {flight.decision}: {self._level(fetch.chunk) or 'text'} stands"
        row = _row(fetch.chunk, fetch.level, decision)
        row["estimated_mbps"] = _mbps(fetch.estimated_bytes_per_second)
        row["measured_mbps"] = _mbps(fetch.size / (ended - started) if arrived and ended > started else None)
        row["fetch_ms"] = (ended - started) * 1e3
        row["bytes"] = fetch.size if arrived else 0
        self._log.append(row)

    def _level(self, chunk: int) -> str | None:
        number = self._reached[chunk]
        return self._ladders[chunk].rungs[number].level if number >= 0 else None

    def _count(self, chunk: int) -> None:
        ladder = self._ladders[chunk]
        self._reached[chunk] = ladder.reached(self._held[chunk])
        self._reaching[chunk] = ladder.reached(self._coming(ladder))
        if self._reached[chunk] >= 0:
            self._missing -= {chunk}

    def _ask(self, now: float, ladder: Ladder, number: int, decision: str) -> Fetch:
        rung = ladder.rungs[number]
        rate = self._estimator.bytes_per_second
        fetch = Fetch(ladder.chunk, rung.level, rung.absent(self._coming(ladder)), rate)
        self._flying.append(Flight(fetch, now, decision))
        self._count(ladder.chunk)
        return fetch

    def _coming(self, ladder: Ladder) -> set[str]:
        flying = [flight.fetch for flight in self._flying if flight.fetch.chunk == ladder.chunk]
        return self._held[ladder.chunk].union(part.level for fetch in flying for part in fetch.parts)

    @property
    def _chunks_flying(self) -> frozenset[int]:
        return frozenset(flight.fetch.chunk for flight in self._flying)

    @property
    def _rate(self) -> float | None:
        """Bytes a second that are counted on; None: no estimate."""
        rate = self._estimator.bytes_per_second
        return None if rate is None else rate * (1 - self._margin)

    @property
    def _busy_since(self) -> float:
        return max(self._last_end, self._flying[0].at)

    def _arrival(self, now: float, size: int, rate: float) -> float:
        waiting = sum(flight.fetch.size for flight in self._flying)
        free = max(now, self._busy_since + waiting / rate) if self._flying else now
        return free + size / rate


def text_row(chunk: int, decision: str) -> dict[str, Any]:
    return _row(chunk, None, decision)


def _row(chunk: int, level: str | None, decision: str) -> dict[str, Any]:
    numbers = dict.fromkeys(("estimated_mbps", "measured_mbps", "fetch_ms", "compute_ms"))
    return {"chunk": chunk, "level": level, **numbers, "bytes": 0, "decision": decision}


def _mbps(bytes_per_second: float | None) -> float | None:
    return None if bytes_per_second is None else bytes_per_second * 8 / 1e6
