"""A fault, then everything is verified, read and asked; compared with the same of the sound subject."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from kvtool.core.cache.integrity import verify_here
from kvtool.core.cache.store import Store
from kvtool.core.errors import KvtoolError
from tests.faults.harness.children import Outcome, in_child
from tests.faults.harness.injury import Fault, flip_bit
from tests.faults.harness.reading import REPORTED, Facts, Known, ask_all, compare, read_all
from tests.faults.harness.subject import Subject, copy, decoder_of


class Range:
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


def verified(path: Path) -> list[str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            verify_here(str(path), "1")
        except KvtoolError as error:
            return [error.message]
    return [json.loads(line)["reason"] for line in said.getvalue().splitlines()]


def pulled(tier: Path, to: Path) -> list[str]:
    from kvtool.core.remote.blobs import open_blobs
    from kvtool.core.remote.pull import pull

    shutil.rmtree(to, ignore_errors=True)
    try:
        with closing(open_blobs(f"file://{tier}")) as blobs:
            return [row["reason"] for row in pull(to, blobs).damaged]
    except KvtoolError as error:
        if error.exit_code not in REPORTED:
            raise
        return [error.message]


def import_pack(pack: Path, to: Path, warned: list[str]) -> Store:
    from kvtool.core.remote.import_ import take
    from kvtool.core.remote.options import ImportOptions

    shutil.rmtree(to, ignore_errors=True)
    warned += [row["reason"] for row in take(to, pack, ImportOptions(mine=True)).damaged]
    return Store.open(to)


def _replaced(fault: Fault, sound: Path, where: Path) -> bool:
    """Whether the injured file is gone, or is another than we made it."""
    if fault.file == ".":
        return False
    path, was = where / fault.file, (sound / fault.file).read_bytes()
    injured = was[: fault.at] if fault.bit is None else flip_bit(was, fault.at, fault.bit)
    return not path.exists() or path.read_bytes() != injured
