"""Part C: the disk is full at a moment of each command: exit 14, nothing lost, and it works again afterwards."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvtool.core.errors import EXIT_NO_SPACE
from tests.faults.harness.children import Ended, in_child
from tests.faults.harness.kills import SECONDS, Killing
from tests.faults.harness.works import Bases, Work


@dataclass(frozen=True, slots=True)
class Filled:
    """The outcome of a full disk; `wrong` is to be empty."""

    what: str
    wrong: list[str] = field(default_factory=list)


class _Full(Killing):
    """The same start, the same checks, another end."""

    def meet(self, ended: Ended, when: str) -> Filled:
        if ended.value == 0:
            return Filled("had room enough")
        if f"Refused: exit {EXIT_NO_SPACE}" not in ended.trouble:
            return Filled("wrong", [f"{when}: {ended.killed_by or ended.trouble[-600:]}"])
        wrong = self._check(when)
        return Filled("wrong" if wrong else "exit 14, completed with room", wrong)

    def run_without_reserve(self, most: int = resource.RLIM_INFINITY) -> Ended:
        """Run with files of at most so many bytes."""

        def work() -> int:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does at its start
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            os.environ["KVTOOL_DISK_RESERVE"] = "0"
            return self.work.run(self.bases, self.folder, self.told)

        return in_child(work, SECONDS)


class Limited(_Full):
    """No file may grow beyond a size (RLIMIT_FSIZE): LMDB meets the very error of a full disk. Needs no root."""

    def __init__(self, bases: Bases, work: Work, place: Path) -> None:
        super().__init__(bases, work, place)
        last = _largest(self.folder / work.into)
        self._start()
        first = _largest(self.folder / work.into)
        # What is made anew and smaller begins with little.
        self._sizes = (first + 1, last) if last > first + 1 else (2**16, last)

    def fill(self, dice: random.Random) -> Filled:
        size = dice.randrange(*self._sizes)
        self._start()
        return self.meet(self.run_without_reserve(size), f"{self.work.name} with files of at most {size} bytes")


def _largest(folder: Path) -> int:
    return max((file.stat().st_size for file in folder.rglob("*") if file.is_file()), default=0)


def can_mount() -> bool:
    if os.geteuid() or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as place:
        try:
            with small_disk(Path(place) / "disk", 2**20):
                return True
        except OSError:
            return False


@contextmanager
def small_disk(at: Path, size: int) -> Iterator[Path]:
    at.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(at)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr)
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=False, capture_output=True)


class Small:
    """A disk that holds the start and a part of what the command adds. Needs root."""

    def __init__(self, bases: Bases, work: Work, place: Path) -> None:
        self._bases, self._work, self._place = bases, work, place
        self._full: _Full | None = None
        self._more = 0

    def fill(self, dice: random.Random) -> Filled:
        with small_disk(self._place / "disk", 2**28) as disk:
            full = self._full = self._full or self._measured(disk)
            room = dice.randrange(4096, self._more)
            full._start()
            stuffing = disk / "stuffing"
            with stuffing.open("wb") as file:
                state = os.statvfs(disk)
                os.posix_fallocate(file.fileno(), 0, max(4096, state.f_bavail * state.f_frsize - room))
            ended = full.run_without_reserve()
            stuffing.unlink()
            return full.meet(ended, f"{full.work.name} with {room} bytes free")

    def _measured(self, disk: Path) -> _Full:
        full = _Full(self._bases, self._work, disk)
        full._start()
        first = _used(disk)
        full._run()
        self._more = max(_used(disk) - first, 2**18)
        return full


def _used(disk: Path) -> int:
    state = os.statvfs(disk)
    return (state.f_blocks - state.f_bfree) * state.f_frsize
