"""Measure once how fast this machine computes passes of a model and loads records of a store, and keep it there."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.cache.side import read_side, write_side
from kvtool.core.common.machine import cores, cpu_name, is_busy
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.chunk_cache import held_on
from kvtool.core.fusion.cost import MEMORY, LoadSpeed, PassSpeed, Speeds, fit, fit_pass, read_numbers
from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.plan import Candidate, Segment
from kvtool.core.fusion.source import KVSource, MemorySource, RecordMissing, StoreSource, with_rows
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.preemption import run_pending, uninterrupted
from kvtool.core.model.prefill import ChunkKV
from kvtool.core.session.levels import ProfileCache

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store
    from kvtool.core.model.decoder import Decoder

FORMAT = 1
_LOOKED_AT = 256  # chunks of a store, to find some at every level
_ROWS = {"cpu": (16, 64, 256), "cuda": (64, 512, 4096)}  # of a pass
_LONGEST = 4096  # keys of the pass whose rows, as many as in the middle one, are scattered
_ROUNDS, _ROUND_SECONDS = 4, 1.5  # at most so many, and two at least, until so much time is gone
_GROUPS = (1, 1, 1, 1, 3, 3, 3)  # chunks loaded together; the first group warms up
_LEVEL_SECONDS = 1.0
_HELD_TOKENS = 128  # of a chunk that stands for those held in memory
_WANTED = sum(_GROUPS)  # chunks that `measure_load` would like to have

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
        source = StoreSource(self._store, self._decoder, ProfileCache(self._store))
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
        wanted = [level for level in levels if len(found[level]) < _WANTED]
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


# ---- computing ---------------------------------------------------------------------------------------------------


def measure_pass(decoder: Decoder) -> PassSpeed:
    """Time passes of a few row counts, the first rows of a prompt and rows scattered over a longer one.

    Every size is timed in every round and its least counts: what disturbs one round does not bend the fit.
    """
    shapes = _shapes(decoder)
    works = [_work(decoder, positions) for positions in shapes]
    least = [math.inf] * len(works)
    started = time.perf_counter()
    for done in range(_ROUNDS):
        for number, work in enumerate(works):
            least[number] = min(least[number], work())
        if done and time.perf_counter() - started > _ROUND_SECONDS:
            break
    keys = [sum(positions) + len(positions) for positions in shapes]
    return fit_pass([(len(shape), seen, took) for shape, seen, took in zip(shapes, keys, least, strict=True)])


def _shapes(decoder: Decoder) -> list[range]:
    """Prompt positions of each pass."""
    longest = max(1, min(decoder.context, _LONGEST))
    sizes = [rows for rows in _ROWS.get(decoder.device.split(":")[0], _ROWS["cpu"]) if rows <= longest] or [longest]
    step = max(1, longest // sizes[len(sizes) // 2])
    return [*map(range, sizes), range(step - 1, longest, step)]


def _work(decoder: Decoder, positions: range) -> Callable[[], float]:
    """A pass of rows at these positions, over a cache of what stands before them; it tells how long it took."""
    cache = decoder.new_cache(positions[-1] + 1)
    cache.set_length(positions[-1] + 1)
    for buffer in cache.buffers:  # what happens to stand there may be slow to compute with
        buffer.keys.zero_()
        buffer.values.zero_()
    chosen = random.Random(0)
    vocabulary = int(decoder.model.get_input_embeddings().weight.shape[0])
    ids = [chosen.randrange(vocabulary) for _ in positions]
    rows = QueryRows.of(torch.tensor(list(positions)), decoder.device)

    def timed() -> float:
        run_pending()
        with uninterrupted():
            started = time.perf_counter()
            decoder.compute(ids, rows, cache).sum().item()  # which waits for a GPU
            return time.perf_counter() - started

    return timed


# ---- loading -----------------------------------------------------------------------------------------------------


def measure_load(decoder: Decoder, source: KVSource, chunks: Sequence[Candidate]) -> LoadSpeed | None:
    """Time the loading of single chunks and of groups, each for the first time; None: none of them can be read."""
    left = list(chunks)
    samples: list[_Loaded] = []
    started = time.perf_counter()
    for number, size in enumerate(_GROUPS):
        group, left = left[:size], left[size:]
        group = group or list(chunks[:size])
        sample = _load(decoder, source, group) if group else None
        if sample is not None and number:
            samples.append(sample)
        if samples and time.perf_counter() - started > _LEVEL_SECONDS:
            break
    if not samples:
        return None
    usual = [
        _usual([sample for sample in samples if sample.chunks == size])
        for size in {sample.chunks for sample in samples}
    ]
    fixed, token = fit([(1.0, sample.tokens) for sample in usual], [sample.seconds for sample in usual])
    most = max(usual, key=lambda sample: sample.tokens)
    if token < most.seconds / most.tokens / 2:  # a prompt holds more than a sample: calls alone cannot be the cost
        token = most.seconds / most.tokens / 2
        fixed = most.seconds / 2
    seconds = sum(sample.seconds for sample in samples)
    return LoadSpeed(
        fixed=fixed,
        token=token,
        busy=sum(sample.core_seconds for sample in samples) / seconds,
        bytes_per_second=decoder.kv_bytes(sum(sample.tokens for sample in samples)) / seconds,
    )


def measure_memory(decoder: Decoder) -> LoadSpeed:
    """Time the loading of chunks that are held decoded, as `ChunkCache` holds them."""
    there = held_on(decoder)
    chunks = {bytes([number]): _of_ones(decoder, there) for number in range(_WANTED)}
    candidates = [Candidate((0,) * _HELD_TOKENS, chunk, level=MEMORY) for chunk in chunks]
    speed = measure_load(decoder, MemorySource(chunks), candidates)
    assert speed is not None  # nothing of it can be missing
    return speed


def _of_ones(decoder: Decoder, there: torch.device | None) -> ChunkKV:
    sides = [[shape.empty(_HELD_TOKENS, decoder.kv_dtype)[side] for shape in decoder.shapes] for side in (0, 1)]
    keys, values = ([torch.ones_like(numbers, device=there) for numbers in side] for side in sides)
    return ChunkKV(keys, values)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One sample of loading."""

    chunks: int
    tokens: int
    seconds: float
    core_seconds: float


def _usual(samples: Sequence[_Loaded]) -> _Loaded:
    """The median by seconds a token: a record's first reading is wanted, not its fastest."""
    return sorted(samples, key=lambda sample: sample.seconds / sample.tokens)[(len(samples) - 1) // 2]


def _load(decoder: Decoder, source: KVSource, chunks: Sequence[Candidate]) -> _Loaded | None:
    """Load chunks as a query does; None: one of them is damaged."""
    segments: list[Segment] = []
    for chunk in chunks:
        ids = tuple(chunk.ids[token] for token in chunk.rows)
        segments.append(Segment(ids, segments[-1].stop if segments else 0, "hit", chunk, kept=chunk.kept))
    tokens = segments[-1].stop
    cache = decoder.new_cache(tokens)
    cache.set_length(tokens)
    run_pending()
    busy, started = time.process_time(), time.perf_counter()
    try:
        with uninterrupted(), Loader(decoder, [segments] * decoder.stored_layers, cache, source) as loader:
            for layer in range(decoder.stored_layers):
                loader.wait(layer)
            cache.buffers[-1].keys.sum().item()  # which waits for a GPU
    except RecordMissing:
        return None
    seconds = max(time.perf_counter() - started, 1e-9)
    return _Loaded(len(chunks), tokens, seconds, time.process_time() - busy)
