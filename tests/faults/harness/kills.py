"""Part B: `kill -9` at a random moment of each command; what is there then, and that the next run completes."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from tests.faults.harness.children import Ended, in_child
from tests.faults.harness.works import Bases, Kept, Work, committed, kept_in, leftovers, make_old, size_of

_COMPARED = ("document ", "level ", "stretch ", "answer ")
_TRIES = 25  # runs for each kill that is wanted: some end before it comes
SECONDS = 180.0


class Killing:
    """A command that is killed again and again, each time from its start."""

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

    def _start(self) -> Kept:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.told.unlink(missing_ok=True)
        self.work.start(self.bases, self.folder)
        return self._kept()

    def _kept(self) -> Kept:
        ended = in_child(lambda: kept_in(self.work, self.folder, self.place / "pulled"))
        if ended.value is None:
            return Kept({}, [], [ended.killed_by or ended.trouble[-600:]])
        return Kept(**ended.value)

    def _run(self, kill_after: float | None = None) -> Ended:
        return in_child(lambda: self.work.run(self.bases, self.folder, self.told), SECONDS, kill_after)

    def _complete(self) -> list[str]:
        ended = self._run()
        return [] if ended.value == 0 else [ended.killed_by or ended.trouble[-600:]]

    def kill(self, dice: random.Random) -> list[str] | None:
        """Kill the command at work, and return what is wrong then; None: it always ended before."""
        for _ in range(_TRIES):
            moment = dice.uniform(0, self.seconds)
            self._start()
            began = time.monotonic()
            if self._run(moment).killed_by == "SIGKILL":
                return self._check(f"{self.work.name} killed after {moment * 1000:.0f} ms")
            self.seconds = min(self.seconds, time.monotonic() - began)  # the machine is less busy than before
        return None

    def _check(self, when: str) -> list[str]:
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
