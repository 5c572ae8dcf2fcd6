"""Part C: the disk is full at a moment of each command: exit 14, nothing lost, and it works again afterwards."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
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
        """Judge a run that met a full disk."""
        if ended.value == 0:
            return Filled("had room enough")
        if f"Refused: exit {EXIT_NO_SPACE}" not in ended.trouble:
            return Filled("wrong", [f"{when}: {ended.killed_by or ended.trouble[-600:]}"])
        before = len(self.result.wrong)
        self._check(when)
        wrong = self.result.wrong[before:]
        return Filled("wrong" if wrong else "exit 14, completed with room", wrong)


class Limited:
    """No file may grow beyond a size (RLIMIT_FSIZE): LMDB meets the very error of a full disk. Needs no root."""

    how = "file size limit"

    def __init__(self, bases: Bases, work: Work, place: Path) -> None:
        self._full = _Full(bases, work, place)
        self._sizes = _file_sizes(self._full)

    def fill(self, dice: random.Random) -> Filled:
        """One run with less room than it needs, or just as much."""
        full, limit = self._full, dice.randrange(*self._sizes)
        full._start()
        ended = in_child(lambda: _limited(full, limit), SECONDS)
        return full.meet(ended, f"{full.work.name} with files of at most {limit} bytes")


def _file_sizes(full: _Full) -> tuple[int, int]:
    """From the largest file of the start to the largest of the end; of what is made anew and smaller, from little."""
    full._start()
    first = _largest(full.folder / full.work.into)
    full._run()
    last = _largest(full.folder / full.work.into)
    return (first + 1, last) if last > first + 1 else (2**16, last)


def _largest(folder: Path) -> int:
    return max((file.stat().st_size for file in folder.rglob("*") if file.is_file()), default=0)


def _limited(full: _Full, limit: int) -> int:
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does at its start
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    os.environ["KVTOOL_DISK_RESERVE"] = "0"
    return full.work.run(full.bases, full.folder, full.told)


def can_mount() -> bool:
    """Whether a small disk of memory can be mounted here."""
    return os.geteuid() == 0 and shutil.which("mount") is not None and _try_mount()


def _try_mount() -> bool:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        try:
            with small_disk(Path(place) / "disk", 2**20):
                return True
        except OSError:
            return False


@contextmanager
def small_disk(at: Path, size: int) -> Iterator[Path]:
    """Mount a disk of so many bytes, in memory."""
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

    how = "small disk"

    def __init__(self, bases: Bases, work: Work, place: Path) -> None:
        self._bases, self._work, self._place = bases, work, place
        self._full: _Full | None = None
        self._more = 0

    def fill(self, dice: random.Random) -> Filled:
        """One run with less room than it needs, or just as much."""
        with small_disk(self._place / "disk", 2**28) as disk:
            full = self._full = self._full or self._measured(disk)
            room = dice.randrange(4096, self._more)
            full._start()
            with _stuffed(disk, room):
                ended = in_child(lambda: _without_reserve(full), SECONDS)
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


@contextmanager
def _stuffed(disk: Path, room: int) -> Iterator[None]:
    """So many bytes are free."""
    state = os.statvfs(disk)
    stuffing = disk / "stuffing"
    with stuffing.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(4096, state.f_bavail * state.f_frsize - room))
    try:
        yield
    finally:
        stuffing.unlink()


def _without_reserve(full: _Full) -> int:
    os.environ["KVTOOL_DISK_RESERVE"] = "0"
    return full.work.run(full.bases, full.folder, full.told)
