"""How fast this machine computes and loads a store's records: measured once, kept beside the store."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.cache.side import read_side, write_side
from kvtool.core.common.machine import cores, cpu_name, is_busy
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.condense import with_rows
from kvtool.core.fusion.plan import Candidate
from kvtool.core.fusion.source import StoreSource
from kvtool.core.fusion.speeds import MEMORY, LoadSpeed, PassSpeed, Speeds, read_numbers
from kvtool.core.session.levels import ProfileShelf
from kvtool.core.session.measuring import WANTED, measure_load, measure_memory, measure_pass

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

    Parameters
    ----------
    say : told before something is measured.
    """

    def __init__(self, store: Store, decoder: Decoder, fingerprint: str, say: Say = lambda text: None) -> None:
        self._say = say
        self._store, self._decoder = store, decoder
        self._file = _SpeedFile(store, fingerprint)
        self._machine = machine_of(decoder.device, str(decoder.dtype).removeprefix("torch."))
        self._passes: PassSpeed | None = None
        self._loads: dict[str, LoadSpeed] = {}
        self._unreadable: set[str] = set()

    def speeds(self, levels: Sequence[str], own: Sequence[bytes]) -> Speeds:
        """Speeds with those of loading at these levels, `MEMORY` too; a level none of whose records can be read is
        left out.

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
        return _on(self._decoder.device, self._passes, self._loads, self._decoder.stored_layers)

    def _measure(self, levels: Sequence[str], own: Sequence[bytes]) -> None:
        named = ["from memory" if level == MEMORY else f"level {level}" for level in levels]
        what = "computes and loads" if self._passes is None else "loads " + ", ".join(named)
        busy = is_busy()
        self._say(
            f"measuring how fast this machine {what}, " + ("for now: it is busy" if busy else "once for this model")
        )
        stored = [level for level in levels if level != MEMORY]
        samples = find_samples(self._store, self._decoder.stored_layers, stored, own)
        if self._passes is None:
            self._passes = measure_pass(self._decoder)
        source = StoreSource(self._store, self._decoder, ProfileShelf(self._store))
        for level in levels:
            speed = (
                measure_memory(self._decoder)
                if level == MEMORY
                else measure_load(self._decoder, source, samples[level])
            )
            if speed is None:
                self._unreadable.add(level)
            else:
                self._loads[level] = speed
        if not busy:
            self._file.keep(self._machine, self._passes, self._loads, self._decoder.stored_layers)

    def _recall(self) -> None:
        if (found := self._file.row(self._machine)) is not None:
            self._passes, self._loads = found


def recalled(store: Store, fingerprint: str, device: str, dtype: str, layers: int) -> Speeds | None:
    """What was measured of a model on this machine, without the model; None if nothing was."""
    found = _SpeedFile(store, fingerprint).row(machine_of(device, dtype))
    return None if found is None else _on(device, *found, layers)


class _SpeedFile:
    """A model's speeds beside the store, a row for each machine."""

    def __init__(self, store: Store, fingerprint: str) -> None:
        self._store = store
        self._name = f"speeds/{fingerprint[:16]}.json"

    def row(self, machine: str) -> tuple[PassSpeed, dict[str, LoadSpeed]] | None:
        """A machine's; None where nothing can be read."""
        try:
            row = self._value()["machines"][machine]
            passes = read_numbers(PassSpeed, row["pass"])
            return passes, {str(level): read_numbers(LoadSpeed, one) for level, one in row["loads"].items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def keep(self, machine: str, passes: PassSpeed, loads: dict[str, LoadSpeed], layers: int) -> None:
        """Put a machine's row; a store that cannot be written stays as it is, and it is measured again next time."""
        machines = self._value().get("machines", {}) | {machine: Speeds(passes, loads, layers).to_json()}
        write_side(self._store, self._name, {"format": FORMAT, "machines": machines})

    def _value(self) -> dict[str, Any]:
        """What was kept; empty where that is nothing or nothing of ours."""
        value = read_side(self._store, self._name, format=FORMAT)
        return value if isinstance(value.get("machines"), dict) else {}


def _on(device: str, passes: PassSpeed, loads: dict[str, LoadSpeed], layers: int) -> Speeds:
    return Speeds(
        passes=passes,
        loads=dict(loads),
        layers=layers,
        cores=cores(),
        threads=torch.get_num_threads(),
        own_memory=device.split(":")[0] != "cpu",
    )


def machine_of(device: str, dtype: str) -> str:
    """What speeds hold for."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name()
    return f"{device} ({name}), {cores()} cores, {torch.get_num_threads()} threads, {dtype}"


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
    return {level: [one for one in with_rows(store, chunks) if one.level] for level, chunks in found.items()}
