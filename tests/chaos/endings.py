"""Faults: a command is ended by `kill -9`, a file size limit or a full disk; a store is injured. What is there then
is whole, or reported, and the next run completes it."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, Self

from kvtool.core.cache.store import Store
from kvtool.core.errors import EXIT_NO_SPACE, KvtoolError
from tests.chaos.children import Ended, Outcome, in_child
from tests.chaos.commands import Bases, Work
from tests.chaos.injury import Fault, flip_bit
from tests.chaos.invariants import (
    REPORTED,
    Facts,
    Kept,
    Known,
    Subject,
    ask_all,
    committed,
    compare,
    copy,
    decoder_of,
    import_pack,
    kept_in,
    leftovers,
    make_old,
    pulled,
    read_all,
    size_of,
    verified,
)

_COMPARED = ("document ", "level ", "stretch ", "answer ")
_TRIES = 25  # runs for each kill that is wanted: some end before it comes
_SECONDS = 180.0


class Trial:
    """A command that is ended again and again, each time from its start."""

    title: ClassVar[str]

    def __init__(self, bases: Bases, work: Work, place: Path) -> None:
        self.bases, self.work, self.place = bases, work, place
        self.folder, self.told = place / "work", place / "told"
        self.before = self._start()
        began = time.monotonic()
        wrong = self._complete()
        self.seconds = time.monotonic() - began
        self.end = self._kept()
        if self.end.wrong or wrong:
            raise RuntimeError(f"{work.name} undisturbed: {self.end.wrong} {wrong}")

    @classmethod
    @contextmanager
    def opened(cls, bases: Bases, work: Work, place: Path) -> Iterator[Self]:
        yield cls(bases, work, place)
        shutil.rmtree(place)

    @classmethod
    def can_be(cls) -> bool:
        return True

    def strike(self, dice: random.Random) -> Outcome:
        raise NotImplementedError

    def _start(self) -> Kept:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.told.unlink(missing_ok=True)
        self.work.start(self.bases, self.folder)
        return self._kept()

    def _kept(self) -> Kept:
        ended = in_child(lambda: kept_in(self.work, self.folder, self.place / "pulled"))
        return Kept({}, [], [ended.why]) if ended.value is None else Kept(**ended.value)

    def _run(self, kill_after: float | None = None) -> Ended:
        return in_child(lambda: self.work.run(self.bases, self.folder, self.told), _SECONDS, kill_after)

    def _complete(self) -> list[str]:
        ended = self._run()
        return [] if ended.value == 0 else [ended.why]

    def _check(self, when: str) -> list[str]:
        """What is wrong after a command was ended."""
        now = self._kept()
        # What it is not to remove is there; what it had committed is; and nothing is that is in neither.
        stays = {name for name, digest in self.before.things.items() if self.end.things.get(name) == digest}
        lost = [name for name in stays if now.things.get(name) != self.before.things[name]]
        lost += [name for name in committed(self.told) if f"file {name}" not in now.things]
        strange = [
            name
            for name, digest in now.things.items()
            if name.startswith(("document ", "passage ", "chunk ", "stretch "))
            and digest not in (self.before.things.get(name), self.end.things.get(name))
        ]
        make_old(self.folder)
        incomplete = self._complete()
        after = self._kept()
        differing = self._too_large(after) if self.work.most is not None else _differing(self.end, after)
        wrong = (*now.wrong, *lost, *strange, *incomplete, *after.wrong, *differing, *leftovers(self.folder))
        return [f"{when}: {one}" for one in wrong]

    def _too_large(self, after: Kept) -> list[str]:
        """What a command did not do that is to make the store smaller, and to take nothing from what it keeps."""
        assert self.work.most is not None
        size, most = size_of(self.folder / self.work.into), self.work.most(self.bases)
        gone = [name for name in self.end.documents if name not in after.documents]
        return [f"{size} bytes are left of {most}"] * (size > most) + [f"{name} is gone" for name in gone]


def _differing(end: Kept, after: Kept) -> list[str]:
    """What an undisturbed run leaves otherwise: documents, records, states, and what is answered from them."""
    names = {name for name in end.things.keys() | after.things.keys() if name.startswith(_COMPARED)}
    return [f"{name} is another than undisturbed" for name in names if end.things.get(name) != after.things.get(name)]


class Killed(Trial):
    title = "kill -9"

    def strike(self, dice: random.Random) -> Outcome:
        for _ in range(_TRIES):
            moment = dice.uniform(0, self.seconds)
            self._start()
            began = time.monotonic()
            if self._run(moment).killed_by == "SIGKILL":
                wrong = self._check(f"after {moment * 1000:.0f} ms")
                return "wrong" if wrong else "whole, and completed by the next run", wrong
            self.seconds = min(self.seconds, time.monotonic() - began)  # the machine is less busy than before
        return "wrong", ["it always ended before the kill"]


class _NoSpace(Trial):
    """A command that meets a full disk ends with exit 14, loses nothing, and works again afterwards."""

    def _meet(self, when: str, most: int = resource.RLIM_INFINITY) -> Outcome:
        """Run with files of at most so many bytes, and without a reserve."""

        def work() -> int:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does at its start
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            os.environ["KVTOOL_DISK_RESERVE"] = "0"
            return self.work.run(self.bases, self.folder, self.told)

        ended = in_child(work, _SECONDS)
        self._make_room()
        if ended.value == 0:
            return "had room enough", []
        refused = f"Refused: exit {EXIT_NO_SPACE}" in ended.trouble
        wrong = self._check(when) if refused else [f"{when}: {ended.why}"]
        return "wrong" if wrong else "exit 14, completed with room", wrong

    def _make_room(self) -> None:
        pass


class Limited(_NoSpace):
    """No file may grow beyond a size (RLIMIT_FSIZE): LMDB meets the very error of a full disk. Needs no root."""

    title = "file size limit"

    def __init__(self, bases: Bases, work: Work, place: Path) -> None:
        super().__init__(bases, work, place)
        last = _largest(self.folder / work.into)
        self._start()
        first = _largest(self.folder / work.into)
        # What is made anew and smaller begins with little.
        self._sizes = (first + 1, last) if last > first + 1 else (2**16, last)

    def strike(self, dice: random.Random) -> Outcome:
        size = dice.randrange(*self._sizes)
        self._start()
        return self._meet(f"with files of at most {size} bytes", size)


def _largest(folder: Path) -> int:
    return max((file.stat().st_size for file in folder.rglob("*") if file.is_file()), default=0)


class Filled(_NoSpace):
    """A disk that holds the start and a part of what the command adds. Needs root."""

    title = "full disk"

    def __init__(self, bases: Bases, work: Work, place: Path) -> None:
        super().__init__(bases, work, place)
        self._start()
        first = _used(place)
        self._run()
        self._more, self._stuffing = max(_used(place) - first, 2**18), place / "stuffing"

    @classmethod
    @contextmanager
    def opened(cls, bases: Bases, work: Work, place: Path) -> Iterator[Self]:
        with _small_disk(place, 2**28):
            yield cls(bases, work, place)

    @classmethod
    def can_be(cls) -> bool:
        if os.geteuid() or shutil.which("mount") is None:
            return False
        with tempfile.TemporaryDirectory() as place:
            try:
                with _small_disk(Path(place) / "disk", 2**20):
                    return True
            except subprocess.CalledProcessError:
                return False

    def strike(self, dice: random.Random) -> Outcome:
        room = dice.randrange(4096, self._more)
        self._start()
        with self._stuffing.open("wb") as file:
            state = os.statvfs(self.place)
            os.posix_fallocate(file.fileno(), 0, max(4096, state.f_bavail * state.f_frsize - room))
        return self._meet(f"with {room} bytes free")

    def _make_room(self) -> None:
        self._stuffing.unlink()


def _used(disk: Path) -> int:
    state = os.statvfs(disk)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


@contextmanager
def _small_disk(at: Path, size: int) -> Iterator[None]:
    at.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(at)]
    subprocess.run(command, capture_output=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(at)], check=False, capture_output=True)


ENDINGS: tuple[type[Trial], ...] = (Killed, Limited, Filled)


# ---- injured stores ----


class Injured:
    """A subject with its truth, ready for faults. One thread, no store open: it forks.

    Parameters
    ----------
    place : a folder for the copies; on a memory disk where there is one, for they are many.
    decoded : how many chunks take turns in being decoded, besides all being read.
    """

    def __init__(self, subject: Subject, place: Path, decoded: int = 4) -> None:
        self.subject, self.place, self._decoded = subject, place, decoded
        self.decoder = decoder_of(subject)
        with closing(Store.open(subject.store)) as store:
            self.known = Known.of(store)
        self.truth = {part: self._truth(part) for part in ("store", "tier", "pack")}

    def _truth(self, part: str) -> Facts:
        copy(getattr(self.subject, part), self._copy(part))
        facts = Facts()
        for dice in range(self._decoded):
            ended = in_child(lambda dice=dice: asdict(self._read(part, dice)))
            if ended.value is None or ended.value["said"]:
                raise RuntimeError(f"the sound {part} is not sound: {ended.why} {ended.value}")
            facts.tensors |= ended.value["tensors"]
            facts.passages |= ended.value["passages"]
        return facts

    def _copy(self, part: str) -> Path:
        return self.place / (f"{part}.kvpack" if part == "pack" else part)

    def suffer(self, fault: Fault, number: int) -> Outcome:
        where = copy(getattr(self.subject, fault.part), self._copy(fault.part))
        fault.strike(where)
        checked = in_child(lambda: self._verify(fault.part))
        read = in_child(lambda: asdict(self._read(fault.part, number)))
        for ended in (read, checked):
            if ended.trouble or read.killed_by:
                return "crash", [f"{fault}: {ended.why}"]
        found = Facts(**read.value)
        wrong, missing = compare(self.truth[fault.part], found)
        if wrong:
            return "wrong", [f"{fault}: {', '.join(wrong[:3])}"]
        if found.said or missing or checked.killed_by or checked.value:
            return "reported", []
        if not fault.live:
            return "no effect", []
        if _replaced(fault, getattr(self.subject, fault.part), where):
            return "made anew", []
        return "not noticed", [str(fault)]

    # ---- in the child ----

    def _read(self, part: str, dice: int) -> Facts:
        home = self.place / "home"
        shutil.rmtree(home, ignore_errors=True)
        os.environ["KVTOOL_HOME"] = str(home)
        try:
            warned: list[str] = []
            with closing(self._open(part, warned)) as store:
                facts = read_all(store, self.known, dice % self._decoded)
                facts.said += warned
                ask_all(store, self.decoder, facts)
                return facts
        except KvtoolError as error:
            if error.exit_code not in REPORTED:
                raise
            return Facts(said=[error.message])

    def _open(self, part: str, warned: list[str]) -> Store:
        if part == "store":
            return Store.open(self._copy(part))
        if part == "tier":
            from kvtool.core.remote.mirror import open_shared

            return open_shared(f"file://{self._copy(part)}", warn=lambda text, hint: warned.append(text))
        return import_pack(self._copy(part), self.place / "imported", warned)

    def _verify(self, part: str) -> list[str]:
        """What `store verify` says; of a tier, what a pull of all of it says."""
        os.environ["KVTOOL_HOME"] = str(self.place / "home")
        if part == "store":
            return verified(self._copy(part))
        if part == "tier":
            return pulled(self._copy(part), self.place / "pulled")
        return []


def _replaced(fault: Fault, sound: Path, where: Path) -> bool:
    """Whether the injured file is gone, or is another than we made it."""
    if fault.file == ".":
        return False
    path, was = where / fault.file, (sound / fault.file).read_bytes()
    injured = was[: fault.at] if fault.bit is None else flip_bit(was, fault.at, fault.bit)
    return not path.exists() or path.read_bytes() != injured
