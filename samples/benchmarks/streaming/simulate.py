"""A policy over a trace: the same object that drives a real link, with a computed one in its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvtool.core.streaming import Fetch, Task
from kvtool.core.streaming.policy import DEPTH, Policy
from samples.benchmarks.streaming.traces import LinkTrace

_LOOK_AGAIN = 1e-3  # seconds after which an idle processor is looked at again, at first


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chunk has reached a level, undecoded."""

    second: float
    chunk: int
    level: str
    size: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a policy over a trace.

    Attributes
    ----------
    ready_s : until all that was fetched is decoded. `ttft_s` : until the pass after it is over.
    met : within the objective.
    loss : mean over tokens of the levels' losses; text loses nothing.
    text_tokens : that were computed from text, during the fetching or in the pass after it.
    vain_tokens : of chunks whose computation was begun, and stopped; some of their layers were computed in vain.
    bytes : of what arrived.
    """

    ready_s: float
    ttft_s: float
    met: bool
    loss: float
    text_tokens: int
    vain_tokens: int
    bytes: int
    levels: dict[int, str | None]
    arrivals: tuple[Arrival, ...]
    log: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return what `stream.py` reports: times in milliseconds, chunks by their number in the context."""
        return {
            "ready_ms": self.ready_s * 1e3,
            "ttft_ms": self.ttft_s * 1e3,
            "met": self.met,
            "kl_answer": self.loss,
            "text_tokens": self.text_tokens,
            "vain_tokens": self.vain_tokens,
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
        """Return the fetch that ends first: (when, the fetch, whether it has arrived)."""
        return min(self._events(policy, now), key=lambda event: event[0])

    def _events(self, policy: Policy, now: float) -> Iterator[tuple[float, _Sent, bool]]:
        free = self._free
        for sent in self.sent:
            free = self._trace.end(max(free, sent.ready), sent.fetch.size)
            limit = policy.give_up_at(sent.fetch)
            arrives = free <= limit
            yield (free if arrives else max(limit, now)), sent, arrives

    def finish(self, sent: _Sent, ended: float) -> float:
        """Take it off the link; when it began to have the link."""
        started = max(sent.at, self._free)
        if sent is self.sent[0]:
            self._free = ended
        self.sent.remove(sent)
        return min(started, ended)


@dataclass(slots=True)
class _Processor:
    """Decodes what has come, and computes a chunk where nothing is to be decoded.

    Attributes
    ----------
    decoded_at : when all that has come will be decoded.
    chunk : that is computed; None: nothing is. `left` : seconds of it.
    """

    task: Task
    slower: float
    decoded_at: float = 0.0
    chunk: int | None = None
    left: float = 0.0
    vain: set[int] = field(default_factory=set)

    def decode(self, seconds: float, now: float) -> None:
        """Decode what came now."""
        self.decoded_at = max(self.decoded_at, now) + seconds

    def begin(self, policy: Policy, now: float) -> None:
        if self.chunk is None and (chunk := policy.compute(now)) is not None:
            self.chunk, self.left = chunk, self.task.alone(chunk) * self.slower

    def go_on(self, since: float, now: float) -> None:
        """Compute while nothing was to be decoded."""
        self.left -= max(0.0, now - max(since, min(self.decoded_at, now)))

    def event(self, policy: Policy, now: float) -> tuple[float, bool]:
        """Return when the computation ends or is stopped, and whether it is whole then."""
        assert self.chunk is not None
        end, limit = max(now, self.decoded_at) + max(self.left, 0.0), policy.stop_at(self.chunk)
        return (end, True) if end <= limit else (max(limit, now), False)

    def stop(self, policy: Policy, now: float, whole: bool) -> None:
        assert self.chunk is not None
        policy.ended(self.chunk, self.task.alone(self.chunk) * self.slower - max(self.left, 0.0), now, whole)
        if not whole:
            self.vain.add(self.chunk)
        self.chunk = None


def simulate(policy: Policy, task: Task, trace: LinkTrace, depth: int = DEPTH, slower: float = 1.0) -> Outcome:
    """Fetch over a trace, decode each chunk and compute others while the next ones are fetched, then compute what is
    left.

    Parameters
    ----------
    policy : fresh, of the same task.
    slower : factor by which computing during the fetching takes longer than the task says.
    """
    tokens = {ladder.chunk: ladder.tokens for ladder in task.ladders}
    link, processor, now = _Link(trace), _Processor(task, slower), 0.0
    arrivals: list[Arrival] = []
    while True:
        while len(link.sent) < depth and (fetch := policy.next(now)) is not None:
            link.send(fetch, now)
        processor.begin(policy, now)
        if not link.sent and processor.chunk is None:
            break
        before = now
        now, sent, whole = _next_event(policy, link, processor, now)
        processor.go_on(before, now)
        if sent is not None:
            policy.done(sent.fetch, link.finish(sent, now), now, whole)
            if whole:
                arrivals.append(Arrival(now, sent.fetch.chunk, sent.fetch.level, sent.fetch.size))
                processor.decode(task.decode(tokens[sent.fetch.chunk], sent.fetch.level), now)
        elif processor.chunk is not None:
            processor.stop(policy, now, whole)
    return _outcome(policy, task, max(now, processor.decoded_at), tuple(arrivals), processor.vain)


def _next_event(policy: Policy, link: _Link, processor: _Processor, now: float) -> tuple[float, _Sent | None, bool]:
    """Return the first event: (when, the fetch or None, whether it is whole); None: the computation, or a pause."""
    events: list[tuple[float, _Sent | None, bool]] = []
    if link.sent:
        events.append(link.first_event(policy, now))
    if processor.chunk is not None:
        end, whole = processor.event(policy, now)
        events.append((end, None, whole))
    else:
        waited = now - link.sent[0].at
        events.append((now + max(_LOOK_AGAIN, waited / 2), None, False))
    return min(events, key=lambda event: event[0])


def _outcome(policy: Policy, task: Task, ready: float, arrivals: tuple[Arrival, ...], vain: set[int]) -> Outcome:
    tokens = {ladder.chunk: ladder.tokens for ladder in task.ladders}
    levels = policy.levels | dict.fromkeys(policy.computed)
    text = frozenset(chunk for chunk, level in levels.items() if level is None)
    ttft = ready + task.compute(text - policy.computed)
    return Outcome(
        ready_s=ready,
        ttft_s=ttft,
        met=meets(ttft, task.objective),
        loss=mean_loss(task, levels),
        text_tokens=sum(tokens[chunk] for chunk in text),
        vain_tokens=sum(tokens[chunk] for chunk in vain),
        bytes=sum(arrival.size for arrival in arrivals),
        levels=levels,
        arrivals=arrivals,
        log=policy.log,
    )


def meets(seconds: float, objective: float) -> bool:
    """Return True if a time is within the objective, but for the rounding of sums."""
    return seconds <= objective + 1e-9


def mean_loss(task: Task, levels: dict[int, str | None]) -> float:
    """Mean over tokens of the loss of the level that each chunk has; 0 for text."""
    weighted = sum(ladder.tokens * _loss(ladder.rungs, levels[ladder.chunk]) for ladder in task.ladders)
    return weighted / max(sum(ladder.tokens for ladder in task.ladders), 1)


def _loss(rungs: Iterable[Any], level: str | None) -> float:
    return next((float(rung.loss) for rung in rungs if rung.level == level), 0.0)
