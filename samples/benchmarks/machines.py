"""kvtool against llama.cpp and plain transformers, machine by machine: measures, and prints a table for each.

    python samples/benchmarks/machines.py measure NAME [--minutes 12] [--as avx2]

runs `peers.py` over prompts of 1,000, 4,000 and 8,000 tokens, round after round as long as the minutes last
(the first is always whole; short prompts get more), and writes machines/NAME.json into samples/results. Stopped, it
resumes from NAME.jsonl next to it. `--as avx2` holds torch, oneDNN, MKL and kvtool's own kernels to what a CPU without
AVX-512 has, in float32; llama.cpp has to be built so, in the environment that runs this:

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF" \
        pip install --no-binary llama-cpp-python llama-cpp-python

    python samples/benchmarks/machines.py tables

prints the tables of all such files; samples/results/speed.md has them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from samples.benchmarks.machine_tables import Machine, table  # noqa: E402

RESULTS = ROOT / "samples" / "results"
CONTEXTS = "1000,4000,8000"
MOST_ROUNDS = 5
# Features of a CPU of 2013 to 2020, for every library that chooses its own kernels.
HELD = {
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "KVTOOL_CPU_FEATURES": "sse4_2 avx avx2 fma f16c bmi1 bmi2",
    }
}


# ---- measuring ----


def measure(folder: Path, given: argparse.Namespace, more: Sequence[str]) -> Path:
    """Rounds of `peers.py` until the time is up; the file of results."""
    folder.mkdir(parents=True, exist_ok=True)
    kept, target = folder / f"{given.name}.jsonl", folder / f"{given.name}.json"
    contexts, started = [int(word) for word in given.context.split(",")], time.monotonic()
    command = ["--resume", str(kept), *more]
    took: dict[int, float] = {}
    for rounds in range(1, MOST_ROUNDS + 1):
        for context in contexts:
            before = time.monotonic()
            if rounds > 1 and before - started + took[context] > given.minutes * 60:
                continue
            bench([*command, "--context", str(context), "--repeat", str(rounds)], given.held)
            took[context] = time.monotonic() - before
            minutes = (time.monotonic() - started) / 60
            print(f"{given.name}: {context} tokens, round {rounds}, after {minutes:.1f} minutes", file=sys.stderr)
    found = bench([*command, "--context", given.context, "--repeat", "1"], given.held)
    told = {"name": given.name, "date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit(), "bench": found}
    target.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    kept.unlink()
    Path(f"{kept}.lock").unlink(missing_ok=True)
    return target


def bench(args: Sequence[str], held: str | None) -> dict[str, Any]:
    """Run `peers.py` and return its JSON; its messages are shown as they come."""
    command = [sys.executable, str(ROOT / "samples/benchmarks/peers.py"), *args, "--json"]
    environment = os.environ | (HELD[held] if held else {})
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def commit() -> str:
    """Return the measured commit."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def print_tables(folder: Path) -> None:
    machines = [Machine.read(path) for path in sorted((folder / "machines").glob("*.json"))]
    if not machines:
        raise SystemExit("there are no results: python samples/benchmarks/machines.py measure NAME")
    print("\n\n".join("\n".join(table(machine)) for machine in machines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where results are")
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="measure this machine; further options go to `peers.py`")
    measuring.add_argument("name", help="of the file of results")
    measuring.add_argument("--context", default=CONTEXTS, metavar="N,N", help="tokens of the prompts")
    measuring.add_argument("--minutes", type=float, default=12.0, help="no further round is begun that would pass this")
    measuring.add_argument("--as", dest="held", choices=sorted(HELD), help="hold this machine to less than it can")
    commands.add_parser("tables", help="print the table of each machine")
    given, more = parser.parse_known_args()
    if given.command == "tables":
        if more:
            parser.error(f"unknown: {' '.join(more)}")
        print_tables(given.results)
    else:
        print(measure(given.results / "machines", given, more))


if __name__ == "__main__":
    main()
