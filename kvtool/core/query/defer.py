"""Deferred loading (`--defer`): how many chunks a round has, and whether its answer is good enough. Runs no model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PROBED = 8  # answer tokens whose probability says how sure a round is

# What models say in place of an answer; in lower case. An answer that begins with one of them is no answer.
_NOT_THERE = (
    *("not mentioned", "not specified", "not provided", "not stated", "not found", "not given", "no information"),
    *("does not mention", "do not mention", "does not say", "doesn't say", "does not provide", "do not provide"),
    *("cannot be determined", "i don't know", "i do not know", "i'm sorry", "i am sorry", "unknown", "unanswerable"),
    *("알 수 없", "찾을 수 없", "언급되지 않", "나와 있지 않", "정보가 없", "모르겠"),
)


@dataclass(frozen=True, slots=True)
class RoundVerdict:
    """Decision that a round's answer is good enough, or not, and the reason."""

    enough: bool
    why: str


@dataclass(frozen=True, slots=True)
class Round:
    """Report of one round: the chunks that it loaded, its cost and its result.

    Attributes
    ----------
    chunks : ids (hex) of the loaded chunks.
    confidence : of the answer's beginning, 0 … 1; None in a last round, where no decision depends on it.
    tokens : `prompt = standing + reused + recomputed + fresh`; `standing` rows are those of the rounds before.
    milliseconds : of fusing and of computing the answer's beginning.
    """

    chunks: tuple[str, ...]
    verdict: RoundVerdict
    confidence: float | None
    bytes_read: int
    milliseconds: float
    tokens: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """A line of the reply's `rounds`."""
        return {
            "chunks": list(self.chunks),
            "enough": self.verdict.enough,
            "reason": self.verdict.why,
            "confidence": self.confidence,
            "bytes_read": self.bytes_read,
            "timing_ms": {"round": round(self.milliseconds, 3)},
            "tokens": self.tokens,
        }


def spans(count: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield the range of chunks, best first, that each round loads: `first`, then as many as are loaded already."""
    start, stop = 0, min(first, count)
    yield start, stop
    while stop < count:
        start, stop = stop, min(2 * stop, count)
        yield start, stop


def confidence(log_p: Sequence[float]) -> float:
    """The geometric mean of the probabilities of an answer's first tokens, from their logarithms."""
    return math.exp(math.fsum(log_p) / len(log_p))


def judge(sure: float, beginning: str, threshold: float) -> RoundVerdict:
    """Decide whether an answer is given: from its beginning, and from how sure the model is of it."""
    text = beginning.lower()
    if (phrase := next((phrase for phrase in _NOT_THERE if phrase in text), None)) is not None:
        return RoundVerdict(False, f"it says that the answer is not there: {phrase!r}")
    if sure < threshold:
        return RoundVerdict(False, f"unsure: {sure:.3f} is below {threshold:.3f}")
    return RoundVerdict(True, f"sure: {sure:.3f} is at least {threshold:.3f}")


ALL_LOADED = RoundVerdict(True, "all chunks are loaded")
