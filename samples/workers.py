"""What distributing costs: one process beside Ray's workers on the same cores; how far one writer carries.

    python samples/workers.py FOLDER --model smollm2 --runs 3 [--compress 2] [--plan 1 8 16 32 64]

Both ingest the same files, or compress a store of them to a level, in turns, each into a store of its own. What is
timed is from the first file or chunk that is taken to the last that is written, and read back: loading, and Ray's own
start, are told apart from it. Of a compression it tells how much of the work is encoding, which workers can do, in
seconds of processors, which depend little on what else the machine does. The plan takes what was measured here of a
worker and of the writer (everything that the one process does).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from kvtool.core.common.machine import cores
from kvtool.core.compress.hands import OwnHands
from kvtool.core.compress.job import compress
from kvtool.core.compress.options import CompressOptions
from kvtool.core.compress.ray_hands import RaysHands
from kvtool.core.crew.crew import Crew
from kvtool.core.crew.options import LOCAL
from kvtool.core.ingest.compute import ChunkStorer
from kvtool.core.ingest.job import ingest
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.ray_storer import RayStorer
from kvtool.core.ingest.storer import Storer

Job = Callable[..., tuple[float, float]]  # path, who → how much was done, and the seconds of computing


@dataclass(frozen=True)
class Run:
    """What one run did, in tokens or in MB of exact KV, and its seconds: before the first of it, from there to the
    last, waiting for workers in between, computing, by all cores together, and of this process on processors."""

    amount: float
    before: float
    seconds: float
    waited: float
    computing: float
    own: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--compress", metavar="LEVEL", help="compress a store of the files, instead of ingesting them")
    parser.add_argument("--plan", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    given = parser.parse_args()
    torch.set_num_threads(cores())
    unit = "tokens" if given.compress is None else "MB of exact KV"
    ways = {"one process": {}, "workers": {"ray": LOCAL, "ray_workers": cores()}}
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        job = _ingesting(given) if given.compress is None else _compressing(given, Path(folder))
        for _ in range(given.runs):
            for name, who in ways.items():
                runs[name].append(_run(job, who))
                print(f"{name}: {runs[name][-1]}", flush=True)
    _tell(runs, unit)
    if given.compress is not None:
        _tell_shares(runs)
    _plan(runs["workers"], given.plan, unit)
    return 0


def _ingesting(given: argparse.Namespace) -> Job:
    def job(path: Path, **who: Any) -> tuple[float, float]:
        report = ingest(path, IngestOptions(paths=(given.folder,), model=given.model, lead_in="warm", **who))
        return report.tokens, report.prefill_seconds * cores()

    return job


def _compressing(given: argparse.Namespace, folder: Path) -> Job:
    """Makes a store of exact records, and another one's profile, before anything is timed."""
    ingest(folder / "exact", IngestOptions(paths=(given.folder,), model=given.model, lead_in="warm"))
    shutil.copytree(folder / "exact", folder / "fitted")
    compress(folder / "fitted", CompressOptions(levels=("4",), fit=True, fit_prompts=8, questions=0))

    def job(path: Path, **who: Any) -> tuple[float, float]:
        shutil.copytree(folder / "exact", path)
        options = CompressOptions(levels=(given.compress,), profile=folder / "fitted", questions=0, **who)
        report = compress(path, options)
        return report.encoded_bytes / 1e6, report.encode_seconds

    return job


def _run(job: Job, who: dict[str, Any]) -> Run:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, _clocks() as clocks:
        amount, computing = job(Path(folder) / "store", **who)
    first, last = clocks["first"][0], clocks["last"][-1]
    own = clocks["own last"][-1] - clocks["own first"][0]
    return Run(amount, first - started, last - first, sum(clocks["wait"]), computing, own)


@contextmanager
def _clocks() -> Iterator[dict[str, list[float]]]:
    """When something was taken, when all was done, by the clock and on processors, and how long each wait for a worker
    was."""
    clocks: dict[str, list[float]] = {"first": [], "last": [], "own first": [], "own last": [], "wait": []}

    def at(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            clocks[name].append(time.perf_counter())
            clocks[f"own {name}"].append(time.process_time())
            return plain(*args)

        return wrapped

    def during(plain: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return plain(*args)
            finally:
                if clocks["first"]:
                    clocks["wait"].append(time.perf_counter() - started)

        return wrapped

    with ExitStack() as stack:
        for owner, name, clock in (
            *((Storer, "take", "first"), (OwnHands, "give", "first"), (RaysHands, "_hand_over", "first")),
            *((ChunkStorer, "close", "last"), (RayStorer, "close", "last")),
            *((OwnHands, "close", "last"), (RaysHands, "close", "last")),
        ):
            stack.enter_context(patch.object(owner, name, at(clock, getattr(owner, name))))
        stack.enter_context(patch.object(Crew, "next", during(Crew.next)))
        yield clocks


def _tell(runs: dict[str, list[Run]], unit: str) -> None:
    print(f"\n{cores()} cores, medians of {len(runs['workers'])} runs in turns")
    for name, some in runs.items():
        rates = [run.amount / run.seconds for run in some]
        before = statistics.median(run.before for run in some)
        spread = f"({min(rates):,.0f} to {max(rates):,.0f})"
        print(f"{name}: {statistics.median(rates):,.0f} {unit}/s {spread}, {before:.1f} s before the first")
    ratios = [far.seconds / own.seconds for own, far in zip(runs["one process"], runs["workers"], strict=True)]
    print(f"time of the workers : of one process, pair by pair: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")


def _tell_shares(runs: dict[str, list[Run]]) -> None:
    """By processors: one process encodes within its own time, workers beside it."""
    for name, beside in (("one process", 0.0), ("workers", 1.0)):
        shares = [run.computing / (run.own + beside * run.computing) for run in runs[name]]
        print(f"{name}: {statistics.median(shares):.0%} of the processors' time is encoding")


def _plan(runs: list[Run], counts: list[int], unit: str) -> None:
    """The writer's process does one thing after another; what it does not wait for is its own work."""
    own = statistics.median((run.seconds - run.waited) / run.amount for run in runs)
    rate = statistics.median(run.amount / run.computing for run in runs)
    print(f"\na worker of one core: {rate:,.0f} {unit}/s; the writer: {own * 1e6:,.1f} µs for each of them")
    print(f"so one writer carries at most {1 / own:,.0f} {unit}/s\n")
    print(f"| workers | {unit}/s | of the workers' own |\n| --- | --- | --- |")
    for count in counts:
        reached = min(count * rate, 1 / own)
        print(f"| {count} | {reached:,.0f} | {reached / (count * rate):.0%} |")


if __name__ == "__main__":
    sys.exit(main())
