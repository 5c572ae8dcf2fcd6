"""A policy over a trace: the same object that drives a real link, with a computed one in its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvtool.core.streaming.book import Fetch, Policy, Task
from kvtool.core.streaming.policy import DEPTH
from kvtool.lab.simulator.traces import LinkTrace


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chunk has reached a level, undecoded."""

    second: float
    chunk: int
    level: str
    size: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy made of a trace.

    Attributes
    ----------
    ready_s : until all that was fetched is decoded. `ttft_s` : until the pass after it is over.
    met : within the objective; None: there is none.
    loss : mean over tokens of the levels' losses; text loses nothing.
    text_tokens : that were computed from text.
    bytes : of what arrived.
    """

    ready_s: float
    ttft_s: float
    met: bool | None
    loss: float
    text_tokens: int
    bytes: int
    levels: dict[int, str | None]
    arrivals: tuple[Arrival, ...]
    log: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Put it as `bench stream` tells it: times in milliseconds, chunks by their number in the context."""
        return {
            "ready_ms": self.ready_s * 1e3,
            "ttft_ms": self.ttft_s * 1e3,
            "met": self.met,
            "kl_answer": self.loss,
            "text_tokens": self.text_tokens,
            "bytes_read": self.bytes,
            "levels": [{"chunk": chunk, "level": level} for chunk, level in self.levels.items()],
            "arrivals": [
                {
                    "ready_ms": arrival.second * 1e3,
                    "chunk": arrival.chunk,
                    "level": arrival.level,
                    "bytes": arrival.size,
                }
                for arrival in self.arrivals
            ],
            "stream": self.log,
        }


@dataclass(slots=True)
class _Sent:
    fetch: Fetch
    at: float
    ready: float  # when its first byte could be there


class _Link:
    """First in, first out. A request's latency passes while those before it are transferred; what is given up frees
    the link at once."""

    def __init__(self, trace: LinkTrace) -> None:
        self._trace = trace
        self._latencies = trace.latencies()
        self._free = 0.0
        self.sent: list[_Sent] = []

    def send(self, fetch: Fetch, now: float) -> None:
        self.sent.append(_Sent(fetch, now, now + next(self._latencies)))

    def first_event(self, policy: Policy, now: float) -> tuple[float, _Sent, bool]:
        """What ends first: (when, what, whether it has arrived)."""
        return min(self._events(policy, now), key=lambda event: event[0])

    def _events(self, policy: Policy, now: float) -> Iterator[tuple[float, _Sent, bool]]:
        free = self._free
        for sent in self.sent:
            free = self._trace.end(max(free, sent.ready), sent.fetch.size)
            limit = policy.give_up_at(sent.fetch)
            arrives = limit is None or free <= limit
            yield (free if arrives or limit is None else max(limit, now)), sent, arrives

    def finish(self, sent: _Sent, ended: float) -> float:
        """Take it off the link; when it began to have the link."""
        started = max(sent.at, self._free)
        if sent is self.sent[0]:
            self._free = ended
        self.sent.remove(sent)
        return min(started, ended)


def simulate(policy: Policy, task: Task, trace: LinkTrace, depth: int = DEPTH) -> Outcome:
    """Fetch over a trace, decode each chunk beside the fetching of the next ones, then compute.

    Parameters
    ----------
    policy : fresh, of the same task.
    """
    tokens = {ladder.chunk: ladder.tokens for ladder in task.ladders}
    link, now, decoded_at = _Link(trace), 0.0, 0.0
    arrivals: list[Arrival] = []
    while True:
        while len(link.sent) < depth and (fetch := policy.next(now)) is not None:
            link.send(fetch, now)
        if not link.sent:
            break
        now, sent, arrived = link.first_event(policy, now)
        policy.done(sent.fetch, link.finish(sent, now), now, arrived)
        if arrived:
            arrivals.append(Arrival(now, sent.fetch.chunk, sent.fetch.level, sent.fetch.size))
            decoded_at = max(decoded_at, now) + task.decode(tokens[sent.fetch.chunk], sent.fetch.level)
    levels = policy.levels
    text = frozenset(chunk for chunk, level in levels.items() if level is None)
    ready = max(now, decoded_at)
    ttft = ready + task.compute(text)
    return Outcome(
        ready_s=ready,
        ttft_s=ttft,
        met=None if task.objective is None else meets(ttft, task.objective),
        loss=mean_loss(task, levels),
        text_tokens=sum(tokens[chunk] for chunk in text),
        bytes=sum(arrival.size for arrival in arrivals),
        levels=levels,
        arrivals=tuple(arrivals),
        log=policy.log,
    )


def meets(seconds: float, objective: float) -> bool:
    """Whether a time is within the objective, but for the rounding of sums."""
    return seconds <= objective + 1e-9


def mean_loss(task: Task, levels: dict[int, str | None]) -> float:
    """Mean over tokens of the loss of the level that each chunk has; 0 for text."""
    weighted = sum(ladder.tokens * _loss(ladder.rungs, levels[ladder.chunk]) for ladder in task.ladders)
    return weighted / max(sum(ladder.tokens for ladder in task.ladders), 1)


def _loss(rungs: Iterable[Any], level: str | None) -> float:
    return next((float(rung.loss) for rung in rungs if rung.level == level), 0.0)
