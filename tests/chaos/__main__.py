"""Inject faults: flipped bits, cut files, kills, full disks, readers during writes; print a table of what came of them.

    .venv/bin/python -m tests.chaos --flips 1000 --cuts 200 --kills 100 --fills 10 --seed 1

Uses one core; Ctrl-C ends it with the table so far. `--model smollm2` injures a store of the packaged model, not of a
tiny random one. Full disks are mounted, which needs root.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

from tests.chaos import injury, readers
from tests.chaos.children import Outcome, in_child
from tests.chaos.commands import WORKS, Bases
from tests.chaos.endings import ENDINGS, Injured, Killed
from tests.chaos.invariants import make_subject

_HOURS = 12 * 3600.0


def main() -> int:
    given = parse()
    table: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    wrong: Counter[tuple[str, str]] = Counter()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="kvtool-faults-", dir=memory if os.access(memory, os.W_OK) else None
    ) as place:
        try:
            for fault, name, (what, why) in outcomes(given, Path(place)):
                for row in ((fault, name), (fault, "all")):
                    table[row][what] += 1
                    wrong[row] += bool(why)
                for one in why:
                    print(f"{fault}, {name}: {what}: {one[:600]}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            pass
    print("| fault | in | times | result | wrong |\n| --- | --- | ---: | --- | ---: |")
    for row, results in sorted(table.items()):
        said = ", ".join(f"{what} {times}" for what, times in results.most_common())
        print(f"| {' | '.join(row)} | {results.total()} | {said} | {wrong[row]} |")
    return 1 if wrong.total() else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--kills", type=int, default=100, help="of each command")
    parser.add_argument("--fills", type=int, default=10, help="full disks met by each command, of each kind")
    parser.add_argument("--readers", type=int, default=200, help="questions of each of four processes; 0: none")
    parser.add_argument("--threads", type=int, default=5, help="rounds of every question in every mode; 0: none")
    parser.add_argument("--only", help="the only command that is killed and meets full disks")
    parser.add_argument("--model", help="default: a tiny random one")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def outcomes(given: argparse.Namespace, place: Path) -> Iterator[tuple[str, str, Outcome]]:
    """Yield each fault, what it was injected into, and what came of it."""
    subject = make_subject(place / "subject", given.model)
    faults = injury.flips(subject, given.flips, given.seed) + injury.cuts(subject, given.cuts, given.seed)
    random.Random(given.seed).shuffle(faults)  # a run that is stopped has had of both
    injured = Injured(subject, place) if faults else None
    for number, fault in enumerate(faults):
        assert injured is not None
        yield "file cut" if fault.bit is None else "one bit flipped", fault.kind, injured.suffer(fault, number)
    works = [work for work in WORKS if given.only in (None, work.name)]
    bases = Bases.make(subject) if given.kills or given.fills else None
    for kind in ENDINGS:
        for work in works:
            count = given.kills if kind is Killed else given.fills
            if bases is None or not count or not kind.can_be():
                continue
            with kind.opened(bases, work, place / f"{kind.title} {work.name}") as trial:
                for number in range(count):
                    dice = random.Random(f"{given.seed} {kind.title} {work.name} {number}")
                    yield kind.title, work.name, trial.strike(dice)
    if given.readers:
        yield (
            "readers during writes",
            "4 processes",
            concurrent(lambda: ask_readers(place, subject.model, given.readers)),
        )
    if given.threads:
        yield "threads", "one session", concurrent(partial(readers.ask_from_threads, subject.store, given.threads))


def ask_readers(place: Path, model: str, questions: int) -> Outcome:
    outcome = readers.run(place / "readers", model, questions=questions)
    return str(outcome), outcome.wrong


def concurrent(work: Callable[[], Outcome]) -> Outcome:
    """What is concurrent runs in a child: this process forks, and so has one thread."""
    ended = in_child(work, _HOURS)
    return ("wrong", [ended.why]) if ended.value is None else (ended.value[0], ended.value[1])


if __name__ == "__main__":
    sys.exit(main())
