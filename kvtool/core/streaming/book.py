"""State of every streaming policy: what has arrived, what is under way, and what was decided."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvtool.core.streaming.estimate import Estimator
from kvtool.core.streaming.ladder import Ladder, Part


@dataclass(frozen=True, slots=True)
class Fetch:
    """A request to the remote tier: these parts of one chunk, which then stands at `level`.

    Attributes
    ----------
    give_up_at : seconds since the question's start after which waiting for it should end, as seen at the request; None:
        never. `Policy.give_up_at` knows what has come since then, and is what a driver keeps to.
    estimated_bytes_per_second : the estimate at the request, before the margin; None: there was none.
    """

    chunk: int
    level: str
    parts: tuple[Part, ...]
    give_up_at: float | None
    estimated_bytes_per_second: float | None

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class Task:
    """A fetch task for one question.

    Attributes
    ----------
    ladders : the most relevant chunk first; only levels that are allowed.
    compute : seconds of the pass after streaming when these chunks are computed from their text. A chunk may add more
        the more others there are, never less.
    objective : seconds from the question's start to the first token; None: no target.
    decode : seconds to decode so many tokens at a level; one chunk after another, during the fetching.
    alone : seconds to compute a chunk without others, during the fetching; `math.inf`: it needs what precedes it.
    """

    ladders: tuple[Ladder, ...]
    compute: Callable[[frozenset[int]], float]
    objective: float | None = None
    decode: Callable[[int, str], float] = lambda tokens, level: 0.0
    alone: Callable[[int], float] = lambda chunk: math.inf


class Policy(Protocol):
    """Says what to fetch, and what to compute meanwhile. Its driver (a simulator, or query/fetching.py over a
    network) keeps to this order:

    1. While fewer than `depth` fetches are outstanding: `next(now)`. Send what it returns; None: nothing to ask for
       now, something may be later if a fetch is outstanding.
    2. While nothing is computed: `compute(now)`. Begin what it returns; what has come is decoded before.
    3. With nothing outstanding and nothing computed after that, streaming is over: compute the chunks of level None
       that are not among `computed` from their text, in the pass.
    4. Wait until a fetch arrives or fails, or its `give_up_at` comes, or the computation ends, or its `stop_at` comes
       (both may change with every report); report that by `done` or `ended` and go to 1. Ask `compute` now and then
       where none of these comes: what a link is expected to do changes while it does nothing.
    """

    def next(self, now: float) -> Fetch | None:
        """Return the fetch to start now, `now` seconds after the question's start."""

    def done(self, fetch: Fetch, started: float, ended: float, arrived: bool) -> None:
        """Note the end of a fetch.

        Parameters
        ----------
        started : the later of its request and the end of the one before it on the same link.
        arrived : False: it failed, or was given up. Nothing of it is there then.
        """

    def give_up_at(self, fetch: Fetch) -> float | None:
        """When waiting for an outstanding fetch should end; None: never."""

    def compute(self, now: float) -> int | None:
        """The chunk to compute alone from its text from now on; None: none for now."""

    def ended(self, chunk: int, seconds: float, now: float, whole: bool) -> None:
        """Note the end of a chunk's computation.

        Parameters
        ----------
        seconds : its duration, without the decoding in between.
        whole : False: it failed, or was stopped. Nothing of it is there then.
        """

    def stop_at(self, chunk: int) -> float | None:
        """When waiting for its computation should end; None: never."""

    @property
    def computed(self) -> frozenset[int]:
        """Chunks that were computed beside the fetching, whatever level they have reached."""

    @property
    def levels(self) -> dict[int, str | None]:
        """The level that each chunk has been fetched at; None: its text is all there is."""

    @property
    def log(self) -> list[dict[str, Any]]:
        """Decisions in the order in which they ended, last the chunks that were never fetched."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A fetch under way."""

    fetch: Fetch
    at: float  # of the request
    decision: str


class Book:
    """The part that policies share. A policy adds `next`, and `give_up_at` where it gives anything up."""

    def __init__(self, task: Task, estimator: Estimator, margin: float = 0.0) -> None:
        self.task = task
        self._estimator = estimator
        self._margin = margin
        self._ladders = {ladder.chunk: ladder for ladder in task.ladders}
        self._held: dict[int, set[str]] = {chunk: set() for chunk in self._ladders}
        self._reached = dict.fromkeys(self._ladders, -1)  # the rung that a chunk stands at
        self._reaching = dict.fromkeys(self._ladders, -1)  # the same once all that is under way has arrived
        self._missing = frozenset(self._ladders)  # chunks that stand at none
        self._flying: list[Flight] = []
        self._closed: set[int] = set()  # chunks of which nothing more is asked
        self._now = 0.0
        self._last_end = 0.0
        self._decoded_at = 0.0  # when all that is there will be decoded
        self._log: list[dict[str, Any]] = []

    def compute(self, now: float) -> int | None:
        """Nothing, but where a policy says otherwise."""
        return None

    def ended(self, chunk: int, seconds: float, now: float, whole: bool) -> None:
        raise NotImplementedError("nothing was to be computed")

    def stop_at(self, chunk: int) -> float | None:
        return None

    @property
    def computed(self) -> frozenset[int]:
        return frozenset()

    @property
    def levels(self) -> dict[int, str | None]:
        return {chunk: self._level(chunk) for chunk in self._ladders}

    @property
    def log(self) -> list[dict[str, Any]]:
        told = {row["chunk"] for row in self._log} | {flight.fetch.chunk for flight in self._flying}
        return self._log + [text_row(chunk, "text") for chunk in self._ladders if chunk not in told]

    def give_up_at(self, fetch: Fetch) -> float | None:
        """Never, but where what it refines is lost, or was computed."""
        return self._now if fetch.chunk in self._closed else None

    def done(self, fetch: Fetch, started: float, ended: float, arrived: bool) -> None:
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
        """Note where a chunk stands after a fetch of it has begun or ended."""
        ladder = self._ladders[chunk]
        self._reached[chunk] = ladder.reached(self._held[chunk])
        self._reaching[chunk] = ladder.reached(self._coming(ladder))
        if self._reached[chunk] >= 0:
            self._missing -= {chunk}

    def _ask(self, now: float, ladder: Ladder, number: int, decision: str) -> Fetch:
        """Fetch what rung `number` of a chunk still needs."""
        rung = ladder.rungs[number]
        rate = self._estimator.bytes_per_second
        draft = Fetch(ladder.chunk, rung.level, rung.absent(self._coming(ladder)), None, rate)
        self._flying.append(Flight(draft, now, decision))
        fetch = Fetch(draft.chunk, draft.level, draft.parts, self.give_up_at(draft), rate)
        self._flying[-1] = Flight(fetch, now, decision)
        self._count(ladder.chunk)
        return fetch

    def _coming(self, ladder: Ladder) -> set[str]:
        """Levels of a chunk's parts that are there or under way."""
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
        """When the oldest outstanding fetch began."""
        return max(self._last_end, self._flying[0].at)

    def _arrival(self, now: float, size: int, rate: float) -> float:
        """When so many bytes asked for now are expected, behind what is outstanding."""
        waiting = sum(flight.fetch.size for flight in self._flying)
        free = max(now, self._busy_since + waiting / rate) if self._flying else now
        return free + size / rate


def text_row(chunk: int, decision: str) -> dict[str, Any]:
    """The log's row of a chunk that is computed from its text."""
    return _row(chunk, None, decision)


def _row(chunk: int, level: str | None, decision: str) -> dict[str, Any]:
    numbers = dict.fromkeys(("estimated_mbps", "measured_mbps", "fetch_ms", "meanwhile_ms"))
    return {"chunk": chunk, "level": level, **numbers, "bytes": 0, "decision": decision}


def _mbps(bytes_per_second: float | None) -> float | None:
    return None if bytes_per_second is None else bytes_per_second * 8 / 1e6
