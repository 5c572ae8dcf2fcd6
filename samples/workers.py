"""What distributing an ingest costs: one process beside Ray's workers on the same cores; how far one writer carries.

    python samples/workers.py FOLDER --model smollm2 --runs 3 [--plan 1 8 16 32 64]

Both compute the same files, in turns, each into a store of its own. What is timed is from the first file that is taken
to the last that is committed: loading, and Ray's own start, are told apart from it. The plan takes what was measured
here of a worker (tokens a second) and of the writer (seconds a token, everything that the one process does).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from kvtool.core.common.machine import cores
from kvtool.core.crew.crew import Crew
from kvtool.core.crew.options import LOCAL
from kvtool.core.ingest.compute import ChunkStorer
from kvtool.core.ingest.job import ingest
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.ray_storer import RayStorer
from kvtool.core.ingest.storer import Storer


@dataclass(frozen=True)
class Run:
    """Seconds of one ingest: before the first file, from there to the last, and waiting for workers in between."""

    tokens: int
    before: float
    seconds: float
    waited: float
    computing: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--plan", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    given = parser.parse_args()
    torch.set_num_threads(cores())
    ways = {"one process": IngestOptions(), "workers": IngestOptions(ray=LOCAL, ray_workers=cores())}
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for _ in range(given.runs):
        for name, options in ways.items():
            runs[name].append(_run(given, options))
            print(f"{name}: {runs[name][-1]}", flush=True)
    _tell(runs)
    _plan(runs["workers"], given.plan)
    return 0


def _run(given: argparse.Namespace, options: IngestOptions) -> Run:
    started = time.perf_counter()
    wanted = replace(options, paths=(given.folder,), model=given.model, lead_in="warm")
    with tempfile.TemporaryDirectory() as folder, _clocks() as clocks:
        report = ingest(Path(folder) / "store", wanted)
    first, last = clocks["take"][0], clocks["close"][-1]
    return Run(report.tokens, first - started, last - first, sum(clocks["next"]), report.prefill_seconds)


@contextmanager
def _clocks() -> Iterator[dict[str, list[float]]]:
    """When files were taken and the storer was closed, and how long each wait for a batch was."""
    clocks: dict[str, list[float]] = {"take": [], "close": [], "next": []}

    def at(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            clocks[name].append(time.perf_counter())
            return plain(*args)

        return wrapped

    def during(plain: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return plain(*args)
            finally:
                clocks["next"].append(time.perf_counter() - started)

        return wrapped

    with (
        patch.object(Storer, "take", at("take", Storer.take)),
        patch.object(ChunkStorer, "close", at("close", ChunkStorer.close)),
        patch.object(RayStorer, "close", at("close", RayStorer.close)),
        patch.object(Crew, "next", during(Crew.next)),
    ):
        yield clocks


def _tell(runs: dict[str, list[Run]]) -> None:
    print(f"\n{cores()} cores, medians of {len(runs['workers'])} runs in turns")
    for name, some in runs.items():
        rates = [run.tokens / run.seconds for run in some]
        before = statistics.median(run.before for run in some)
        spread = f"({min(rates):,.0f} to {max(rates):,.0f})"
        print(f"{name}: {statistics.median(rates):,.0f} tokens/s {spread}, {before:.1f} s before the first file")
    ratios = [far.seconds / own.seconds for own, far in zip(runs["one process"], runs["workers"], strict=True)]
    print(f"time of the workers : of one process, pair by pair: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")


def _plan(runs: list[Run], counts: list[int]) -> None:
    """The writer's process does one thing after another; what it does not wait for is its own work."""
    own = statistics.median((run.seconds - run.waited) / run.tokens for run in runs)
    rate = statistics.median(run.tokens / run.computing / cores() for run in runs)
    print(f"\na worker of one core: {rate:,.0f} tokens/s; the writer: {own * 1e6:,.1f} µs a token")
    print(f"so one writer takes in at most {1 / own:,.0f} tokens/s\n")
    print("| workers | tokens/s | of the workers' own |\n| --- | --- | --- |")
    for count in counts:
        reached = min(count * rate, 1 / own)
        print(f"| {count} | {reached:,.0f} | {reached / (count * rate):.0%} |")


if __name__ == "__main__":
    sys.exit(main())
