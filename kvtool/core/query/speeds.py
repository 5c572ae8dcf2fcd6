"""How fast this machine computes and loads a store's records: measured once, kept beside the store."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.cache.layout import atomic_write
from kvtool.core.errors import DamagedError, NoSpaceError
from kvtool.core.fusion.plan import Candidate
from kvtool.core.fusion.source import StoreSource
from kvtool.core.fusion.speeds import LoadSpeed, PassSpeed, Speeds, read_numbers
from kvtool.core.levels import ProfileShelf
from kvtool.core.machine import is_busy
from kvtool.core.query.measuring import WANTED, measure_load, measure_pass

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.model.decoder import Decoder

FORMAT = 1
_LOOKED_AT = 256  # chunks of a store, to find some at every level

Say = Callable[[str], None]


class SpeedBook:
    """The speeds of one model on this machine, measured at the first need and kept in a file beside the store.

    The file is one for a model, with a row for each device, core and thread count and dtype. What cannot be read is
    measured again; what is measured while the machine is busy, or for a store that cannot be written, serves this
    process only.

    Attributes
    ----------
    say : told before something is measured.
    """

    def __init__(self, store: Store, decoder: Decoder, fingerprint: str) -> None:
        self.say: Say = lambda text: None
        self._store, self._decoder = store, decoder
        self._name = f"speeds/{fingerprint[:16]}.json"
        self._passes: PassSpeed | None = None
        self._loads: dict[str, LoadSpeed] = {}
        self._unreadable: set[str] = set()

    def speeds(self, levels: Sequence[str], own: Sequence[bytes]) -> Speeds:
        """Speeds with those of loading at these levels; a level none of whose records can be read is left out.

        Parameters
        ----------
        own : chunks of the prompt; others are measured where there are any, since a record is read faster again.
        """
        if self._passes is None:
            self._recall()
        missing = [level for level in levels if level not in self._loads and level not in self._unreadable]
        if self._passes is None or missing:
            self._measure(missing, own)
        assert self._passes is not None
        return Speeds(
            passes=self._passes,
            loads=dict(self._loads),
            layers=len(self._decoder.layers),
            cores=_cores(),
            threads=torch.get_num_threads(),
            own_memory=self._decoder.device.split(":")[0] != "cpu",
        )

    def _measure(self, levels: Sequence[str], own: Sequence[bytes]) -> None:
        what = "computes and loads" if self._passes is None else "loads level " + ", ".join(levels)
        busy = is_busy()
        self.say(
            f"measuring how fast this machine {what}, " + ("for now: it is busy" if busy else "once for this model")
        )
        samples = find_samples(self._store, len(self._decoder.layers), levels, own)
        if self._passes is None:
            self._passes = measure_pass(self._decoder)
        source = StoreSource.of(self._store, self._decoder, ProfileShelf(self._store))
        for level in levels:
            speed = measure_load(self._decoder, source, samples[level])
            if speed is None:
                self._unreadable.add(level)
            else:
                self._loads[level] = speed
        if not busy:
            self._keep()

    # ---- the file ----

    def _recall(self) -> None:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            row = self._file()["machines"][_machine(self._decoder)]
            passes = read_numbers(PassSpeed, row["pass"])
            self._loads = {str(level): read_numbers(LoadSpeed, one) for level, one in row["loads"].items()}
            self._passes = passes

    def _file(self) -> dict[str, Any]:
        """What was kept; empty where that is nothing or nothing of ours."""
        try:
            value = json.loads(self._store.side_file(self._name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        ours = isinstance(value, dict) and value.get("format") == FORMAT and isinstance(value.get("machines"), dict)
        return value if ours else {}

    def _keep(self) -> None:
        if self._store.read_only or self._passes is None:
            return
        row = Speeds(self._passes, self._loads, len(self._decoder.layers)).to_json()
        machines = self._file().get("machines", {}) | {_machine(self._decoder): row}
        data = json.dumps({"format": FORMAT, "machines": machines}, indent=1).encode()
        with contextlib.suppress(OSError, NoSpaceError):  # then it is measured again next time
            atomic_write(self._store.side_file(self._name), data)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _machine(decoder: Decoder) -> str:
    """What the speeds hold for."""
    device = decoder.device
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    dtype = str(decoder.dtype).removeprefix("torch.")
    return f"{device} ({name}), {_cores()} cores, {torch.get_num_threads()} threads, {dtype}"


def find_samples(store: Store, layers: int, levels: Sequence[str], own: Sequence[bytes]) -> dict[str, list[Candidate]]:
    """Some chunks that are stored at each of these levels, in an order that does not depend on the ingest's."""
    others = sorted(set(store.chunk_ids()) - set(own))
    random.Random(0).shuffle(others)
    found: dict[str, list[Candidate]] = {level: [] for level in levels}
    for chunk in (*others[:_LOOKED_AT], *own):
        wanted = [level for level in levels if len(found[level]) < WANTED]
        if not wanted:
            break
        try:
            info = store.chunk_info(chunk)
        except DamagedError:
            continue
        if info is not None and info.layers == layers:
            for level in set(wanted) & set(store.levels(chunk)):
                found[level].append(Candidate(info.token_ids, chunk, level=level))
    return found
