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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "samples" / "results"
CONTEXTS = "1000,4000,8000"
MOST_ROUNDS = 5
QUIET = 0.9  # share of the cores below which a table says that others had them, too
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


# ---- tables ----


@dataclass(frozen=True)
class Machine:
    """A file of results."""

    name: str
    date: str
    commit: str
    bench: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Machine:
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @property
    def title(self) -> str:
        """Return its name in tables."""
        host = self.bench["host"]
        held = ", limited to AVX2" if host["held_to"] else ""
        cores = "1 core" if self.bench["threads"] == 1 else f"{self.bench['threads']} cores"
        return f"{host['cpu']}{held}, {cores}, {self.bench['resolved']['dtype']}"

    @property
    def contexts(self) -> list[int]:
        return sorted({row["context"] for row in self.bench["rows"]})

    def rows(self, context: int, kind: str, fusion: str = "") -> list[dict[str, Any]]:
        """The rows of one kind of contender."""
        return [
            row
            for row in self.bench["rows"]
            if (row["context"], row["kind"]) == (context, kind) and (not fusion or row["fusion"] == fusion)
        ]

    def mode(self, context: int, fusion: str) -> dict[str, Any]:
        (row,) = self.rows(context, "kvtool", fusion)
        return row

    @property
    def share(self) -> float:
        """Return the share of its cores that llama.cpp got during prefill; near 1, as its threads spin."""
        rows = [row for row in self.bench["rows"] if row["kind"] == "llama.cpp"]
        return min(row["ttft_cpu_ms"] / row["ttft_ms"] for row in rows) / int(self.bench["threads"])

    def llama(self, context: int) -> Llama:
        return Llama(self.rows(context, "llama.cpp"))


@dataclass(frozen=True)
class Llama:
    """llama.cpp at one context: of every quantity the best that one of its settings gave."""

    rows: list[dict[str, Any]]

    @property
    def ttft_ms(self) -> float:
        return float(min(row["ttft_ms"] for row in self.rows))

    @property
    def saved_ms(self) -> float:
        return float(min(row["saved"]["ttft_ms"] for row in self.rows))

    @property
    def saved_bytes_per_token(self) -> float:
        return float(min(row["saved"]["bytes_per_token"] for row in self.rows))

    @property
    def decoding(self) -> float:
        return float(max(row["decode_tokens_per_second"] for row in self.rows))

    @property
    def ready_ms(self) -> float:
        return float(min(ready_ms(row) for row in self.rows))

    @property
    def peak_bytes(self) -> int | None:
        return min((row["peak_bytes"] for row in self.rows if row["peak_bytes"]), default=None)


def ready_ms(row: dict[str, Any]) -> float:
    """Libraries and model."""
    return float(row["import_ms"] + row["model_load_ms"])


@dataclass(frozen=True)
class Compared:
    """One quantity of kvtool and of a peer; more is better where `more` says so."""

    what: str
    ours: float
    theirs: float
    unit: str
    more: bool = False

    @property
    def ahead(self) -> float:
        """Return how many times better kvtool is; below 1 it is worse."""
        return self.ours / self.theirs if self.more else self.theirs / self.ours

    @property
    def cell(self) -> str:
        """Both numbers and the factor, in bold where it is below 1."""
        factor = f"{self.ahead:.2g}x" if self.ahead >= 1 else f"**{self.ahead:.2f}x**"
        return f"{_number(self.ours)} · {_number(self.theirs)} ({factor})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def compared(machine: Machine, context: int) -> list[Compared]:
    """Every quantity at one context."""
    llama, full = machine.llama(context), machine.mode(context, "full")
    (plain,) = machine.rows(context, "transformers")
    union, reuse = machine.mode(context, "union"), machine.mode(context, "reuse")
    stored = {row["level"]: row["bytes_per_token"] for row in machine.bench["stored"]}
    speed = "decode_tokens_per_second"
    rows = [
        Compared("first token: full prefill", full["ttft_ms"], llama.ttft_ms, "ms"),
        Compared("first token: `union` against full prefill", union["ttft_ms"], llama.ttft_ms, "ms"),
        Compared("first token: `reuse` against a saved state", reuse["ttft_ms"], llama.saved_ms, "ms"),
        Compared("decoding", union[speed], llama.decoding, "tokens/s", more=True),
        Compared("ready: libraries and model", ready_ms(union), llama.ready_ms, "ms"),
        Compared("stored, exact", stored["lossless"] / 1e3, llama.saved_bytes_per_token / 1e3, "KB a token"),
        Compared("stored, level 2", stored["2"] / 1e3, llama.saved_bytes_per_token / 1e3, "KB a token"),
    ]
    if union["peak_bytes"] and llama.peak_bytes:
        rows.append(Compared("peak memory", union["peak_bytes"] / 1e6, llama.peak_bytes / 1e6, "MB"))
    rows.append(Compared("`transformers`: full prefill", full["ttft_ms"], plain["ttft_ms"], "ms"))
    rows.append(Compared("`transformers`: decoding", union[speed], plain[speed], "tokens/s", more=True))
    return rows


def table(machine: Machine) -> Iterator[str]:
    """Yield a machine's heading, its table, and how it was measured."""
    yield from (f"### {machine.title}", "")
    heads = (f"{context:,} tokens" for context in machine.contexts)
    yield f"| kvtool · llama.cpp (how many times better) | {' | '.join(heads)} |"
    yield "|" + " --- |" * (1 + len(machine.contexts))
    for line in zip(*(compared(machine, context) for context in machine.contexts), strict=True):
        yield f"| {line[0].what}, {line[0].unit} | {' | '.join(one.cell for one in line)} |"
    yield from ("", *_origin(machine))


def _origin(machine: Machine) -> Iterator[str]:
    host = machine.bench["host"]
    counts = sorted({row["count"] for row in machine.bench["rows"]})
    versions = dict.fromkeys(f"{who['kind']} {who['version']}" for who in machine.bench["contenders"])
    yield f"- machine: {host['cpu']} ({' '.join(host['cpu_features'])}) · {' · '.join(versions)}"
    if machine.share < QUIET:
        yield f"- **not quiet**: others had the cores, too; llama.cpp's prefill got {machine.share:.0%} of them"
    yield f"- date: {machine.date} · commit: {machine.commit} · medians of {counts[0]} to {counts[-1]} rounds"
    flag = " --as avx2" if host["held_to"] else ""
    yield f"- command: `python samples/benchmarks/machines.py measure {machine.name}{flag}`"


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
