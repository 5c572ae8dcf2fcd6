"""Times of the codec in two checkouts, in turn, each with the same tasks in the same order.

    chrt -r 1 taskset -c 1 python samples/tools/codec_in_turn.py BEFORE AFTER --store STORE

Two versions of `samples.benchmarks.bench codec` may have other tasks, and a task is faster after one that has read the
same bytes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHES = ("samples.benchmarks.bench.codec", "kvtool.bench.codec")  # the second in older trees
TASKS = ("encode", "decode", "decode by chunk")


def rows(store: str, repeat: int) -> dict[str, float]:
    """Measure in this process: nanoseconds a raw byte of each task."""
    from kvtool.core.cache.store import Store

    found = next(name for name in BENCHES if importlib.util.find_spec(name.rpartition(".")[0]))
    bench: Any = importlib.import_module(found)
    all_tasks = bench.all_tasks
    bench.all_tasks = lambda *given: [task for task in all_tasks(*given) if task.what in TASKS]
    with Store.open(Path(store)) as opened:
        report = bench.bench_codec(opened, 4096, repeat, threads=1)
    made = report["rows"] if isinstance(report, dict) else [vars_of(row) for row in report.rows]
    return {f"{row['what']} {row['level']}": 1 / row["gb_per_s"] for row in made}


def vars_of(row: Any) -> dict[str, Any]:
    """Return the fields of a row of an older checkout."""
    return {name: getattr(row, name) for name in ("what", "level", "gb_per_s")}


def main() -> None:
    """Run both checkouts in turn, each of them first every other time, and print after by before."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkouts", nargs="+", help="BEFORE and AFTER")
    parser.add_argument("--store", required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()
    if given.child:
        print(json.dumps(rows(given.store, given.repeat)))
        return
    found: dict[str, list[dict[str, float]]] = {checkout: [] for checkout in given.checkouts}
    for number in range(given.rounds):
        for checkout in given.checkouts[:: -1 if number % 2 else 1]:
            own = {**os.environ, "PYTHONPATH": str(Path(checkout).resolve())}
            command = [sys.executable, __file__, checkout, "--store", given.store, "--child"]
            done = subprocess.run([*command, "--repeat", str(given.repeat)], env=own, stdout=-1, check=True, text=True)
            found[checkout].append(json.loads(done.stdout.splitlines()[-1]))
    before, after = found.values()
    for task in before[0]:
        old, new = ([run[task] for run in runs] for runs in (before, after))
        print(f"{task:24} {statistics.median(new) / statistics.median(old):.3f}  best {min(new) / min(old):.3f}")


if __name__ == "__main__":
    main()
