"""Levels that a chunk can be fetched at: their losses, and the bytes of each."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """The records of one chunk at one stored level, in bytes; they are fetched as a whole or not at all."""

    level: str
    size: int


@dataclass(frozen=True, slots=True)
class Rung:
    """A level that a chunk can be decoded at.

    Attributes
    ----------
    loss : nats a token of the answer; 0 for `raw` and `lossless`.
    parts : all that must be there. A nested level: the coarser levels that it refines, and its own. Another: its own.
    """

    level: str
    loss: float
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes from nothing."""
        return sum(part.size for part in self.parts)

    def absent(self, held: Set[str]) -> tuple[Part, ...]:
        """The parts that are still to be fetched when those of the `held` levels are there."""
        return tuple(part for part in self.parts if part.level not in held)


@dataclass(frozen=True, slots=True)
class Ladder:
    """The levels of one chunk, the coarsest first.

    Attributes
    ----------
    chunk : its number in the prompt.
    rungs : with every step the loss falls and the size grows; empty: nothing is stored, the text is all there is.
    """

    chunk: int
    tokens: int
    rungs: tuple[Rung, ...]

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
        """Return True if any level loses something."""
        return bool(self.rungs) and self.rungs[0].loss > 0

    def missing(self, held: Set[str], rung: Rung) -> int:
        """Bytes that a rung still takes when the parts of the `held` levels are there."""
        return sum(part.size for part in rung.absent(held))

    def reached(self, held: Set[str]) -> int:
        """Number of the finest rung whose parts are all there; -1: none."""
        whole = (number for number, rung in enumerate(self.rungs) if not rung.absent(held))
        return max(whole, default=-1)
