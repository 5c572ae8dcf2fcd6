"""Fetching from one end while computing from the other, simulated: with and without, at several speeds of computing.

    .venv/bin/python samples/both_ends.py [--shape mistral-7b] [--speeds 1 .3 .1 .01] > both_ends.md

Over the 31 traces of `kvtool bench stream`: the share of requests in time and the mean loss at each objective, and
without an objective how soon the context is there at a level, beside the link alone and the text alone. Then which end
is computed: the least relevant chunk first, or the most relevant one, with the loss weighted by relevance too.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvtool.core.streaming.book import Book, Task
from kvtool.core.streaming.both_ends import BothEnds
from kvtool.core.streaming.estimate import make_estimator
from kvtool.core.streaming.ladder import Ladder
from kvtool.core.streaming.policy import Adaptive
from kvtool.lab.bench.stream_context import Context, shape_context
from kvtool.lab.bench.stream_data import DEFAULT_LEVELS
from kvtool.lab.bench.stream_speeds import GivenSpeeds
from kvtool.lab.bench.stream_traces import generate
from kvtool.lab.simulator.simulate import Outcome, simulate
from kvtool.lab.simulator.traces import LinkTrace

OBJECTIVES = (0.3, 0.5, 1.0, 2.0)
PATIENCE = 600.0  # seconds: a trace on which the link alone takes longer tells nothing of a mean


class FromTheSameEnd(BothEnds):
    """The most relevant chunks computed, and the link through with the others first."""

    def _texts(self) -> Iterator[int]:
        order = {ladder.chunk: at for at, ladder in enumerate(self.task.ladders)}
        found = list(super()._texts())
        rank = {chunk: (chunk not in self._missing, order[chunk]) for chunk in found}
        yield from sorted(found, key=lambda chunk: rank[chunk])

    def _order(self) -> list[Ladder]:
        objective = self.task.objective
        mine = self._meanwhile(self._all_by()) if objective is not None else set()
        order = super()._order()
        return [one for one in order if one.chunk not in mine] + [one for one in order[::-1] if one.chunk in mine]


POLICIES: dict[str, type[Adaptive]] = {"link alone": Adaptive, "both ends": BothEnds, "most relevant": FromTheSameEnd}


@dataclass(frozen=True, slots=True)
class Sum:
    """Of one policy over all traces and objectives; shares of requests or of tokens."""

    met: float
    loss: float
    weighted: float
    text: float
    vain: float
    megabytes: float

    @classmethod
    def of(cls, context: Context, found: Sequence[Outcome]) -> Sum:
        return cls(
            statistics.fmean(bool(one.met) for one in found),
            statistics.fmean(one.loss for one in found),
            statistics.fmean(weighted_loss(context, one) for one in found),
            statistics.fmean(one.text_tokens for one in found) / context.tokens,
            statistics.fmean(one.vain_tokens for one in found) / context.tokens,
            statistics.fmean(one.bytes for one in found) / 1e6,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="mistral-7b")
    parser.add_argument("--context", type=int, default=10_000)
    parser.add_argument("--chunk-tokens", type=int, default=1500)
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 0.3, 0.1, 0.01], help="of an A100's")
    given = parser.parse_args()
    context = shape_context(given.shape, given.context, given.chunk_tokens, GivenSpeeds("a100", None, None))
    traces = generate()
    under_objectives(context, traces, given.speeds)
    slower_than_expected(context, traces)
    without_objective(context, traces, given.speeds)
    return 0


def under_objectives(context: Context, traces: Sequence[LinkTrace], speeds: Sequence[float]) -> None:
    print("| computing, of an A100 | policy | in time | loss | by relevance | computed | in vain | MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for speed in speeds:
        for name, policy in POLICIES.items():
            found = [
                run(policy, task_at(context, speed, objective), trace) for trace in traces for objective in OBJECTIVES
            ]
            one = Sum.of(context, found)
            told = f"{one.met:.0%} | {one.loss:.4f} | {one.weighted:.4f} | {one.text:.0%} | {one.vain:.1%}"
            print(f"| {speed:g} | {name} | {told} | {one.megabytes:.0f} |")
    print()


def slower_than_expected(context: Context, traces: Sequence[LinkTrace]) -> None:
    """Computing beside the fetching takes longer than the policy was told."""
    print("| computing takes, times what was expected | in time | loss | in vain |\n| --- | --- | --- | --- |")
    for slower in (0.7, 1.0, 1.5, 2.0, 4.0):
        found = [run(BothEnds, task_at(context, 1.0, at), trace, slower) for trace in traces for at in OBJECTIVES]
        one = Sum.of(context, found)
        print(f"| {slower:g} | {one.met:.0%} | {one.loss:.4f} | {one.vain:.1%} |")
    print()


def without_objective(context: Context, traces: Sequence[LinkTrace], speeds: Sequence[float]) -> None:
    """Medians over the traces of the seconds until the context is there."""
    print("| level | computing, of an A100 | link alone, s | text alone, s | both ends, s | of the sooner one: "
          "median, worst | computed | in vain |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for level in ("3", "2", "lossless"):
        for speed in speeds:
            task = at_level(task_at(context, speed, None), level)
            text = task.compute(frozenset(ladder.chunk for ladder in task.ladders))
            rows = [(run(Adaptive, task, trace), run(BothEnds, task, trace)) for trace in traces]
            rows = [(link, both) for link, both in rows if link.ttft_s < PATIENCE]
            ratios = [both.ttft_s / min(link.ttft_s, text) for link, both in rows]
            one = Sum.of(context, [both for _, both in rows])
            times = [statistics.median(part.ttft_s for part in column) for column in zip(*rows, strict=True)]
            print(
                f"| {level} | {speed:g} | {times[0]:.2f} | {text:.2f} | {times[1]:.2f} | "
                f"{statistics.median(ratios):.2f}, {max(ratios):.2f} | {one.text:.0%} | {one.vain:.1%} |"
            )


def run(policy: type[Adaptive], task: Task, trace: LinkTrace, slower: float = 1.0) -> Outcome:
    made: Book = policy(task, make_estimator("harmonic"))
    return simulate(made, task, trace, slower=slower)


def task_at(context: Context, speed: float, objective: float | None) -> Task:
    """The context's task on a machine that computes so much faster than the context's."""
    task = context.task(objective)
    return replace(
        task,
        compute=lambda texts: task.compute(texts) / speed,
        alone=lambda chunk: task.alone(chunk) / speed,
    )


def at_level(task: Task, level: str) -> Task:
    """Without an objective: everything at this level, or exact."""
    loss = DEFAULT_LEVELS.levels[level].loss
    return replace(
        task,
        ladders=tuple(
            Ladder.of(one.chunk, one.tokens, [rung for rung in one.rungs if rung.level == level and rung.loss == loss])
            for one in task.ladders
        ),
    )


def weighted_loss(context: Context, one: Outcome) -> float:
    """The loss where the most relevant chunk counts whole, the second half, the third a third …"""
    losses = {name: of.loss for name, of in DEFAULT_LEVELS.levels.items()}
    weights = [1 / (rank + 1) for rank in range(len(context.ladders))]
    levels = (one.levels[ladder.chunk] for ladder in context.ladders)
    lost = sum(weight * losses[level] for weight, level in zip(weights, levels, strict=True) if level is not None)
    return lost / sum(weights)


if __name__ == "__main__":
    raise SystemExit(main())
