"""Policies of a bounded store in front of a tier, over a trace of questions: what each fetches.

Chunks have levels that refine one another; a question needs all of them of each of its chunks, and fetches what is not
here. Times are numbers of questions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtool.core.cache.warmth import joined

LEVELS: Mapping[str, float] = {"4": 0.5, "3": 0.6, "2": 1.1}  # bits a number that each adds, the coarsest first
Question = Sequence[int]  # chunks


class Order(Protocol):
    """By what chunks go: the lowest first."""

    def asked(self, chunk: int, at: int) -> None: ...

    def gone(self, chunk: int) -> None: ...

    def turn(self, chunk: int) -> float: ...


@dataclass
class Recency:
    """Least recently used."""

    turns: dict[int, float] = field(default_factory=dict)

    def asked(self, chunk: int, at: int) -> None:
        """It was used now."""
        self.turns[chunk] = at

    def gone(self, chunk: int) -> None:
        """What was noted of it stays."""

    def turn(self, chunk: int) -> float:
        """When it was used last."""
        return self.turns.get(chunk, 0.0)


@dataclass
class Warmth(Recency):
    """Uses that count for half as much after `half_life` questions, as kvtool has it."""

    half_life: float = 300.0

    def asked(self, chunk: int, at: int) -> None:
        """Add a use."""
        self.turns[chunk] = joined(self.turn(chunk), at + 1, self.half_life)


@dataclass
class Frequency(Recency):
    """LFU with dynamic ageing (Arlitt et al., ACM SIGMETRICS Performance Evaluation Review 27(4), 2000, section 3)."""

    counts: Counter[int] = field(default_factory=Counter)
    age: float = 0.0

    def asked(self, chunk: int, at: int) -> None:
        """Count it, on top of the age."""
        self.counts[chunk] += 1
        self.turns[chunk] = self.age + self.counts[chunk]

    def gone(self, chunk: int) -> None:
        """The age is the rank of what went last; its count begins anew."""
        self.age = max(self.age, self.turn(chunk))
        del self.counts[chunk]


@dataclass(frozen=True, slots=True)
class Policy:
    """How room is made.

    Attributes
    ----------
    order : makes one for each run.
    by_level : the finest level of all chunks goes before a coarser one of any; else a chunk goes whole.
    admits : what is colder than what is here does not come in; else everything does.
    spare : share of the budget that is freed besides.
    """

    order: Callable[[], Order]
    by_level: bool = False
    admits: bool = False
    spare: float = 0.1


@dataclass(frozen=True, slots=True)
class Tally:
    """Shares of what was asked: bytes that were fetched, chunks that were here whole, or at their coarsest level."""

    fetched: float
    whole: float
    coarse: float


class Front:
    """A store of `budget` bytes. `sizes`: a chunk's numbers, so that a level has `LEVELS` times as many bytes."""

    def __init__(self, sizes: Sequence[float], budget: float, policy: Policy) -> None:
        self._sizes, self._budget, self._policy, self._order = sizes, budget, policy, policy.order()
        self.held: dict[int, set[str]] = {}
        self.used = 0.0

    def lacks(self, chunk: int) -> float:
        """Bytes of a chunk that are not here."""
        return self._sizes[chunk] * (sum(LEVELS.values()) - self._bits(chunk))

    def ask(self, question: Question, at: int) -> float:
        """Fetch what a question lacks, and keep of it what the policy lets in. Returns the bytes fetched."""
        coming = {chunk: self.lacks(chunk) for chunk in question if self.lacks(chunk) > 0}
        for chunk in question:
            self._order.asked(chunk, at)
        if self.used + sum(coming.values()) > self._budget:
            self._make_room(coming)
        for chunk in sorted(coming, key=self._order.turn, reverse=True):
            if self.used + self.lacks(chunk) <= self._budget:
                self.used += self.lacks(chunk)
                self.held[chunk] = {*LEVELS}
        return sum(coming.values())

    def _make_room(self, coming: Mapping[int, float]) -> None:
        may_go = iter(sorted(self.held.keys() - coming.keys(), key=lambda chunk: (self._order.turn(chunk), chunk)))
        spare = self._budget * self._policy.spare
        if not self._policy.admits:
            wanted = self.used + sum(coming.values()) + spare - self._budget
            self._drop(may_go, min(wanted, self.used), float("inf"))
            return
        need = 0.0
        for chunk in sorted(coming, key=self._order.turn, reverse=True):
            need += coming[chunk]
            self._drop(may_go, self.used + need - self._budget, self._order.turn(chunk))
        self._drop(may_go, self.used + spare - self._budget, min(map(self._order.turn, coming)))

    def _drop(self, may_go: Iterable[int], wanted: float, colder_than: float) -> None:
        order = [*may_go] if self._policy.by_level else may_go
        for levels in [[level] for level in reversed([*LEVELS])] if self._policy.by_level else [[*LEVELS]]:
            for chunk in order if wanted > 0 else ():
                if self._order.turn(chunk) >= colder_than:
                    return
                before = self._bits(chunk)
                self.held[chunk].difference_update(levels)
                freed = self._sizes[chunk] * (before - self._bits(chunk))
                self.used -= freed
                wanted -= freed
                if not self.held[chunk]:
                    del self.held[chunk]
                    self._order.gone(chunk)
                if wanted <= 0:
                    return

    def _bits(self, chunk: int) -> float:
        return sum(LEVELS[level] for level in self.held.get(chunk, ()))


def play(sizes: Sequence[float], questions: Sequence[Question], budget: float, policy: Policy, since: int = 0) -> Tally:
    """Ask one question after the other; counted are those from number `since` on."""
    front = Front(sizes, budget, policy)
    fetched = asked = 0.0
    whole = coarse = chunks = 0
    for at, question in enumerate(questions):
        if at >= since:
            asked += sum(sizes[chunk] for chunk in question) * sum(LEVELS.values())
            whole += sum(front.lacks(chunk) == 0 for chunk in question)
            coarse += sum("4" in front.held.get(chunk, ()) for chunk in question)
            chunks += len(question)
        came = front.ask(question, at)
        fetched += came if at >= since else 0.0
    return Tally(fetched / asked, whole / chunks, coarse / chunks)
