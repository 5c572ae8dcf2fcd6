"""Faults, really injected: flipped bits, cut files, kills, full disks, readers with writers; one table of results.

    .venv/bin/python tests/support/faults.py --minutes 60 --journal /tmp/faults

Run again with the same --journal to continue where it was stopped; `--minutes 0` prints the table of what is there.
Uses one core. `--model smollm2` injures a store of the packaged model instead of a tiny random one's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

from tests.faults.harness import flips, full, injury, threads  # noqa: E402
from tests.faults.harness.kills import Killing  # noqa: E402
from tests.faults.harness.subject import make_subject  # noqa: E402
from tests.faults.harness.works import WORKS, Bases  # noqa: E402

Unit = tuple[str, str, int]  # part, name, number
FLIPS, CUTS, KILLS = "flip", "cut", "kill"
LIMIT, DISK, READERS, THREADS = "file limit", "full disk", "readers", "threads"
TITLES = {
    FLIPS: "one bit flipped",
    CUTS: "file cut",
    KILLS: "kill -9",
    LIMIT: "file size limit met",
    DISK: "full disk",
    READERS: "readers beside writers",
    THREADS: "threads on one session",
}


def main() -> int:
    given = parse()
    given.journal.mkdir(parents=True, exist_ok=True)
    journal = Journal(given.journal / "journal.jsonl")
    deadline = time.monotonic() + 60 * given.minutes
    if given.minutes:
        for unit, work in units(given, journal):
            if time.monotonic() > deadline:
                break
            if unit not in journal.done:
                journal.add(unit, work())
    rows = table_of(journal.rows)
    print(json.dumps(rows) if given.json else render(rows, journal.rows, given))
    return 1 if any(row["wrong"] for row in rows) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="then stop; the journal stays")
    parser.add_argument("--journal", type=Path, default=Path(".faults"), help="a folder for all that is made")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--kills", type=int, default=100, help="of each command")
    parser.add_argument("--fills", type=int, default=10, help="full disks met by each command, of each kind")
    parser.add_argument("--readers", type=int, default=200, help="questions of each of four processes; 0: none")
    parser.add_argument("--threads", type=int, default=5, help="rounds of every question in every mode; 0: none")
    parser.add_argument("--only", help="the only command that is killed and meets full disks")
    parser.add_argument("--model", help="default: a tiny random one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    return parser.parse_args()


# ---- what is done ----


class Journal:
    """What was done, a line each, so that a run that was stopped can continue."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        self.done = {(row["part"], row["name"], row["number"]) for row in self.rows}
        self._commit = commit()

    def add(self, unit: Unit, came: dict[str, Any]) -> None:
        """Durable enough: whole lines."""
        part, name, number = unit
        row = {"part": part, "name": name, "number": number, "commit": self._commit, **came}
        self.rows.append(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if row["wrong"]:
            print(f"{part} {name} {number}: {row['what']}: {row['why'][:600]}", file=sys.stderr, flush=True)


def commit() -> str:
    """Of this tree; a "+" where it was changed since."""
    done = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def units(given: argparse.Namespace, journal: Journal) -> Iterator[tuple[Unit, Callable[[], dict[str, Any]]]]:
    """All there is to do, each as what does it. What it needs is made when the first one that needs it comes."""
    bench = Bench(given)
    faults = [*((FLIPS, number) for number in range(given.flips)), *((CUTS, number) for number in range(given.cuts))]
    random.Random(given.seed).shuffle(faults)  # a run that is stopped has had of both
    for part, number in faults:
        yield (part, "", number), lambda part=part, number=number: bench.fault(part, number)
    for number in range(given.kills):
        for name in bench.works:
            yield (KILLS, name, number), lambda name=name, number=number: bench.kill(name, number)
    for how in (LIMIT, DISK):
        for number in range(given.fills):
            for name in bench.works:
                yield (how, name, number), lambda h=how, name=name, number=number: bench.fill(h, name, number)
    if given.readers:
        yield (READERS, "4 processes", 0), bench.readers
    if given.threads:
        yield (THREADS, "4 threads", 0), bench.threads


class Bench:
    """Subject, bases and scratch folder, made on need and kept."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self.works = {work.name: work for work in WORKS if given.only in (None, work.name)}
        self._made: dict[str, Any] = {}
        memory = Path("/dev/shm")
        place = memory if os.access(memory, os.W_OK) else given.journal
        self._place = place / f"kvtool-faults-{os.getpid()}"

    def _get(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @property
    def subject(self) -> Any:
        """Made anew by every run: a store of another commit is another store."""

        def make() -> Any:
            folder = self._given.journal.absolute() / "subject"
            shutil.rmtree(folder, ignore_errors=True)
            return make_subject(folder, self._given.model)

        return self._get("subject", make)

    def fault(self, part: str, number: int) -> dict[str, Any]:
        found = self._get("range", lambda: flips.Range(self.subject, self._place))
        choose = {FLIPS: injury.flips, CUTS: injury.cuts}[part]
        faults = self._get(part, lambda: choose(self.subject, getattr(self._given, f"{part}s"), self._given.seed))
        outcome = found.suffer(faults[number], number)
        why = f"{outcome.fault}: {outcome.why}"
        return {"kind": outcome.fault.kind, "what": outcome.what, "why": why, "wrong": outcome.wrong}

    def _bases(self) -> Any:
        return self._get("bases", lambda: Bases.make(self.subject))

    def kill(self, name: str, number: int) -> dict[str, Any]:
        place = self._place / f"kill-{name}"
        killing = self._get(f"kill {name}", lambda: Killing(self._bases(), self.works[name], place))
        wrong = killing.kill(random.Random(f"{self._given.seed} {name} {number}"))
        if wrong is None:
            return {"what": "never met at work", "why": "", "wrong": True}
        what = "wrong" if wrong else "whole, and completed by the next run"
        return {"what": what, "why": "; ".join(wrong), "wrong": bool(wrong)}

    def fill(self, how: str, name: str, number: int) -> dict[str, Any]:
        if how == DISK and not self._get("mount", full.can_mount):
            return {"what": "not tried: needs root", "why": "", "wrong": False}
        kind, place = {LIMIT: full.Limited, DISK: full.Small}[how], self._place / f"{how} {name}"
        disk = self._get(f"{how} {name}", lambda: kind(self._bases(), self.works[name], place))
        filled = disk.fill(random.Random(f"{self._given.seed} {how} {name} {number}"))
        return {"what": filled.what, "why": "; ".join(filled.wrong), "wrong": bool(filled.wrong)}

    def readers(self) -> dict[str, Any]:
        """`tests/support/readers.py` on a store of its own."""
        folder = self._place / "readers"
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        more = ["--questions", str(self._given.readers)]
        return self._said([str(ROOT / "tests/support/readers.py"), str(folder), self.subject.model, *more])

    def threads(self) -> dict[str, Any]:
        """In a process of their own: this one forks."""
        rounds = str(self._given.threads)
        return self._said([threads.__file__, str(self.subject.store), str(self.subject.corpus), rounds])

    def _said(self, words: list[str]) -> dict[str, Any]:
        variables = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=variables, check=False)
        last = done.stdout.strip().rpartition("\n")[2]
        what = last if not done.returncode else "wrong"
        return {"what": what, "why": (done.stdout + done.stderr)[-800:], "wrong": done.returncode != 0}

    def __del__(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)


# ---- the table ----


def table_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], Counter[str]] = {}
    wrong: Counter[tuple[str, str]] = Counter()
    for row in rows:
        key = (row["part"], row["name"] or row["kind"])
        found.setdefault(key, Counter())[row["what"]] += 1
        wrong[key] += row["wrong"]
    parts = list(TITLES)
    keys = sorted(found, key=lambda key: (parts.index(key[0]), key[1]))
    return [
        {"part": part, "what": what, "times": found[part, what].total(), "came": dict(found[part, what].most_common()),
         "wrong": wrong[part, what]}
        for part, what in keys
    ]  # fmt: skip


def render(rows: list[dict[str, Any]], journal: list[dict[str, Any]], given: argparse.Namespace) -> str:
    commits = ", ".join(dict.fromkeys(row["commit"] for row in journal))
    asked = {name: getattr(given, name) for name in ("flips", "cuts", "kills", "fills", "readers", "threads", "seed")}
    asked |= {"only": given.only} if given.only else {}
    command = " ".join(["tests/support/faults.py", *(f"--{name} {value}" for name, value in asked.items())])
    lines = [
        "# Faults, injected",
        "",
        f"{os.cpu_count()} × {platform.machine()}, {datetime.now(UTC):%Y-%m-%d}, commit {commits}:",
        "",
        f"    {command}",
        "",
        "| fault | in | times | what came of it | wrong |",
        "| --- | --- | ---: | --- | ---: |",
    ]
    for row in rows:
        came = ", ".join(what if times == row["times"] else f"{what} {times}" for what, times in row["came"].items())
        lines.append(f"| {TITLES[row['part']]} | {row['what']} | {row['times']} | {came} | {row['wrong']} |")
    totals: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    for row in rows:
        totals[row["part"]] += row["times"]
        bad[row["part"]] += row["wrong"]
    for part, times in totals.items():
        lines.append(f"| **{TITLES[part]}** | **all** | **{times}** | | **{bad[part]}** |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
