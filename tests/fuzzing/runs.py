"""Runs of both fuzzers' lives: a command line, one line a life, a shrink."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.families import HYBRIDS, KINDS, save_tiny

FAMILIES = (*KINDS, *(name for name in HYBRIDS if name != "jamba"))  # whose forward cannot go on from a state


class WrongError(AssertionError):
    """An error for a result that is not the right one."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a life. Its random numbers depend on its number, so it does the same if others are left out."""

    number: int
    name: str

    def dice(self, seed: int, family: str) -> random.Random:
        return random.Random(f"{seed} {family} {self.number}")


Begin = Callable[[str, int, Path, Path], Any]  # a life of a family, a seed, the model's folder, and one of its own
Names = Sequence[tuple[str, int]]  # steps, and how often each of them comes


@dataclass(slots=True)
class Lived:
    """The outcome of a life; `at`: the step at which it failed, one past the last where its end did."""

    steps: int
    checks: Counter[str]
    at: int | None = None
    why: str = ""
    trace: str = ""


def steps_of(names: Names, family: str, seed: int, least: int, most: int) -> list[Step]:
    dice = random.Random(f"steps {seed} {family}")
    words, weights = zip(*names, strict=True)
    return [Step(n, name) for n, name in enumerate(dice.choices(words, weights, k=dice.randint(least, most)))]


def live(begin: Begin, family: str, seed: int, steps: Sequence[Step], place: Path | None = None) -> Lived:
    """Live a life in a folder of its own, up to its first failure."""
    model = model_of(family)
    folder = Path(tempfile.mkdtemp(prefix=f"life-{family}-{seed}-", dir=place or _scratch()))
    home = os.environ.get("KVTOOL_HOME")
    os.environ["KVTOOL_HOME"] = str(folder / "home")
    number, life = -1, None
    checks: Counter[str] = Counter()
    try:
        life = begin(family, seed, model, folder)
        checks = life.checks
        for step in steps:
            number = step.number
            life.live(step)
        number += 1
        life.end()
        return Lived(len(steps), checks)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0][:1500]
        done = sum(step.number <= number for step in steps)
        return Lived(done, checks, number, why, traceback.format_exc())
    finally:
        if life is not None:
            life.close()
        if home is None:
            del os.environ["KVTOOL_HOME"]
        else:
            os.environ["KVTOOL_HOME"] = home
        shutil.rmtree(folder, ignore_errors=True)


def shrunk(begin: Begin, family: str, seed: int, steps: Sequence[Step], failed: Lived, seconds: float) -> list[Step]:
    """Fewer steps that fail, too: the prefix up to the failure, then without each step that is not needed."""
    assert failed.at is not None
    left = [step for step in steps if step.number <= failed.at]
    deadline = time.monotonic() + seconds
    size = len(left) // 2
    while size and time.monotonic() < deadline:
        for start in range(len(left) - 1 - size, -1, -size):  # the last step is the one that fails
            fewer = left[:start] + left[start + size :]
            if time.monotonic() < deadline and live(begin, family, seed, fewer).at == failed.at:
                left = fewer
        size //= 2
    return left


_models: dict[str, Path] = {}
_folders: list[Path] = []


def model_of(family: str) -> Path:
    if family not in _models:
        _models[family] = save_tiny(family, _scratch() / "models" / family)
    return _models[family]


def _scratch() -> Path:
    """Return a folder for all of this process, in memory if possible."""
    if not _folders:
        memory = Path("/dev/shm")
        _folders.append(Path(tempfile.mkdtemp(prefix="kvtool-lives-", dir=memory if memory.is_dir() else None)))
    return _folders[0]


def clean() -> None:
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)
    _models.clear()


# ---- the command line ----


def main(begin: Begin, names: Names, what: str) -> int:
    """Live until the time is over; 1 where something failed."""
    given = _parse(what)
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    least, _, most = given.steps.partition("-")
    lives: list[Lived] = []
    deadline = time.monotonic() + given.seconds
    families, seed = given.family or list(FAMILIES), given.seed
    try:
        while len(lives) < given.lives if given.lives else time.monotonic() < deadline or not lives:
            family = families[seed % len(families)]
            steps = steps_of(names, family, seed, int(least), int(most or least))
            steps = [step for step in steps if not given.only or step.number in given.only]
            lives.append(_one(begin, family, seed, steps, given))
            seed += 1
    finally:
        clean()
    failed = sum(life.at is not None for life in lives)
    checks = sum((life.checks for life in lives), Counter[str]())
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(checks.items()))
    steps_lived = sum(life.steps for life in lives)
    _say(f"\n{len(lives)} lives, {steps_lived} steps, {checks.total()} checks, {failed} failed\nChecks: {kinds}.")
    return 1 if failed else 0


def _one(begin: Begin, family: str, seed: int, steps: list[Step], given: argparse.Namespace) -> Lived:
    started = time.monotonic()
    lived = live(begin, family, seed, steps)
    checks, took = lived.checks.total(), time.monotonic() - started
    _say(f"{family:16} seed {seed:5}  {lived.steps:3} steps  {checks:4} checks  {took:6.1f} s")
    if lived.at is None:
        return lived
    _say(f"FAILED at step {lived.at}: {lived.why}\n{lived.trace}")
    if not given.only:
        steps = shrunk(begin, family, seed, steps, lived, given.shrink)
    words = " ".join(f"{step.number}:{step.name}" for step in steps)
    only = ",".join(str(step.number) for step in steps)
    again = f"--family {family} --seed {seed} --steps {given.steps} --lives 1 --only {only}"
    _say(f"    shortest: {words}\n    again: python -m {given.module} {again}")
    return lived


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _parse(what: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m tests.fuzzing.{what}")
    parser.add_argument("--seconds", type=float, default=600.0, help="then no further life begins")
    parser.add_argument("--seed", type=int, default=1, help="of the first life; each further one has the next")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="default: all, one after another")
    parser.add_argument("--steps", default="25-60", metavar="LEAST-MOST")
    parser.add_argument("--lives", type=int, default=0, help="no more than so many; 0: as the time allows")
    parser.add_argument("--only", type=_numbers, help="numbers of the steps that are lived, as a failure prints them")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds that a failure's steps are made fewer in")
    given = parser.parse_args()
    given.module = f"tests.fuzzing.{what}"
    return given


def _numbers(text: str) -> frozenset[int]:
    return frozenset(int(word) for word in text.split(","))
