"""The benches of `samples/benchmarks/bench`, run in this process."""

from __future__ import annotations

from kvtool.cli.app import main
from samples.benchmarks.bench.__main__ import app
from tests.cli.working import Done, script


def run_bench(*args: object) -> Done:
    return script(lambda words: main(words, app, "bench"), *args)
