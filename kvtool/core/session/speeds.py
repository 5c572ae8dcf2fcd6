"""Calibration of the cost model: measure once this machine's speeds of a model's passes and of loading records."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.common.machine import cores, cpu_name, is_busy
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.loader import Loader
from kvtool.core.fusion.plan import (
    MEMORY,
    Candidate,
    LoadSpeed,
    PassSpeed,
    Segment,
    Speeds,
    fit,
    fit_pass,
    read_numbers,
    with_stored_rows,
)
from kvtool.core.fusion.source import KVSource, MemorySource, RecordMissing, StoreSource, held_on
from kvtool.core.model.forward import QueryRows
from kvtool.core.model.prefill import ChunkKV
from kvtool.core.session.identity import ProfileCache

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


class SpeedBook:
    """The speeds of one model on this machine, measured at the first use and stored next to the store, with a row for
    each device, core and thread count and dtype. Speeds of a busy machine, or of a read-only store, serve this process
    only."""

    def __init__(
        self, store: Store, decoder: Decoder, fingerprint: str, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._say = say
        self._store, self._decoder = store, decoder
        self._fingerprint = fingerprint
        self._machine = machine_of(decoder.device, decoder.loaded.arithmetic.dtype)
        self._passes: PassSpeed | None = None
        self._loads: dict[str, LoadSpeed] = {}
        self._unreadable: set[str] = set()

    def speeds(self, levels: Sequence[str], prompt_ids: Sequence[bytes]) -> Speeds:
        """Return the speeds, with those of loading at these levels (`MEMORY`, too) that have a readable record. Chunks
        other than the prompt's (`prompt_ids`) are measured if possible, since a second read of a record is faster."""
        if self._passes is None:
            stored = _stored_speeds(self._store, self._fingerprint, self._machine)
            self._passes, self._loads = stored or (None, {})
        missing = [level for level in levels if level not in self._loads and level not in self._unreadable]
        if self._passes is None or missing:
            self._measure(missing, prompt_ids)
        assert self._passes is not None
        return _on(self._decoder.device, self._passes, self._loads, self._decoder.stored_layers)

    def _measure(self, levels: Sequence[str], prompt_ids: Sequence[bytes]) -> None:
        named = ["from memory" if level == MEMORY else f"level {level}" for level in levels]
        work = "computes and loads" if self._passes is None else "loads " + ", ".join(named)
        busy = is_busy()
        self._say(
            f"measuring how fast this machine {work}, " + ("for now: it is busy" if busy else "once for this model")
        )
        stored = [level for level in levels if level != MEMORY]
        samples = find_samples(self._store, self._decoder.stored_layers, stored, prompt_ids)
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
            measured = Speeds(self._passes, self._loads, self._decoder.stored_layers).to_json()
            machines = _machines(self._store, self._fingerprint) | {self._machine: measured}
            self._store.write_side(_file(self._fingerprint), {"format": FORMAT, "machines": machines})


def recalled(store: Store, fingerprint: str, device: str, dtype: str, layers: int) -> Speeds | None:
    """Read a model's speeds on this machine, without loading it; None if not measured."""
    speeds = _stored_speeds(store, fingerprint, machine_of(device, dtype))
    return None if speeds is None else _on(device, *speeds, layers)


def _stored_speeds(store: Store, fingerprint: str, machine: str) -> tuple[PassSpeed, dict[str, LoadSpeed]] | None:
    try:
        row = _machines(store, fingerprint)[machine]
        loads = {str(level): read_numbers(LoadSpeed, speed) for level, speed in row["loads"].items()}
        return read_numbers(PassSpeed, row["pass"]), loads
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _machines(store: Store, fingerprint: str) -> dict[str, Any]:
    rows = store.read_side(_file(fingerprint), format=FORMAT).get("machines")
    return rows if isinstance(rows, dict) else {}


def _file(fingerprint: str) -> str:
    return f"speeds/{fingerprint[:16]}.json"


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
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name()
    return f"{device} ({name}), {cores()} cores, {torch.get_num_threads()} threads, {dtype}"


def find_samples(
    store: Store, layers: int, levels: Sequence[str], prompt_ids: Sequence[bytes]
) -> dict[str, list[Candidate]]:
    """Choose chunks that are stored at each of these levels, in an order independent of the ingest's."""
    others = sorted(set(store.chunk_ids()) - set(prompt_ids))
    random.Random(0).shuffle(others)
    candidates: dict[str, list[Candidate]] = {level: [] for level in levels}
    for chunk in (*others[:_LOOKED_AT], *prompt_ids):
        lacking = [level for level in levels if len(candidates[level]) < _WANTED]
        if not lacking:
            break
        try:
            info = store.chunk_info(chunk)
        except DamagedError:
            continue
        if info is not None and info.layers == layers:
            for level in set(lacking) & set(store.levels(chunk)):
                candidates[level].append(Candidate(info.token_ids, chunk, level=level))
    return {
        level: [chunk for chunk in with_stored_rows(store, chunks) if chunk.level]
        for level, chunks in candidates.items()
    }


def measure_pass(decoder: Decoder) -> PassSpeed:
    """Time passes over the first rows of a prompt, of some sizes, and over rows scattered in a longer one. Every size
    is timed in every round, and its least time counts: one disturbed round does not bend the fit."""
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
    longest = max(1, min(decoder.context, _LONGEST))
    sizes = [rows for rows in _ROWS.get(decoder.device.split(":")[0], _ROWS["cpu"]) if rows <= longest] or [longest]
    step = max(1, longest // sizes[len(sizes) // 2])
    return [*map(range, sizes), range(step - 1, longest, step)]


def _work(decoder: Decoder, positions: range) -> Callable[[], float]:
    """Prepare a pass over rows at these positions of a prompt; each call returns its seconds."""
    cache = decoder.new_cache(positions[-1] + 1)
    cache.set_length(positions[-1] + 1)
    for buffer in cache.buffers:  # arbitrary memory may hold numbers that are slow to compute with
        buffer.keys.zero_()
        buffer.values.zero_()
    chosen = random.Random(0)
    vocabulary = int(decoder.model.get_input_embeddings().weight.shape[0])
    ids = [chosen.randrange(vocabulary) for _ in positions]
    rows = QueryRows.of(torch.tensor(list(positions)), decoder.device)

    def timed() -> float:
        decoder.pause()
        with decoder.pausing(None):
            started = time.perf_counter()
            decoder.compute(ids, rows, cache).sum().item()  # which waits for a GPU
            return time.perf_counter() - started

    return timed


def measure_load(decoder: Decoder, source: KVSource, chunks: Sequence[Candidate]) -> LoadSpeed | None:
    """Time the first loading of single chunks and of groups; None if none can be read."""
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
    there, layers = held_on(decoder), [shape.empty(_HELD_TOKENS, decoder.kv_dtype) for shape in decoder.shapes]
    chunks = {
        bytes([number]): ChunkKV(*([torch.ones_like(layer[side], device=there) for layer in layers] for side in (0, 1)))
        for number in range(_WANTED)
    }
    candidates = [Candidate((0,) * _HELD_TOKENS, chunk, level=MEMORY) for chunk in chunks]
    speed = measure_load(decoder, MemorySource(chunks), candidates)
    assert speed is not None  # nothing of it can be missing
    return speed


@dataclass(frozen=True, slots=True)
class _Loaded:
    chunks: int
    tokens: int
    seconds: float
    core_seconds: float


def _usual(samples: Sequence[_Loaded]) -> _Loaded:
    """Return the median by seconds a token: the fastest read of a record is not its first."""
    return sorted(samples, key=lambda sample: sample.seconds / sample.tokens)[(len(samples) - 1) // 2]


def _load(decoder: Decoder, source: KVSource, chunks: Sequence[Candidate]) -> _Loaded | None:
    """Load chunks as a query does; None if one of them is damaged."""
    segments: list[Segment] = []
    for chunk in chunks:
        ids = tuple(chunk.ids[token] for token in chunk.rows)
        segments.append(Segment(ids, segments[-1].stop if segments else 0, "hit", chunk, placed_rows=chunk.stored_rows))
    tokens = segments[-1].stop
    cache = decoder.new_cache(tokens)
    cache.set_length(tokens)
    decoder.pause()
    busy, started = time.process_time(), time.perf_counter()
    try:
        with decoder.pausing(None), Loader(decoder, segments, cache, source) as loader:
            for layer in range(decoder.stored_layers):
                loader.wait(layer)
            cache.buffers[-1].keys.sum().item()  # which waits for a GPU
    except RecordMissing:
        return None
    seconds = max(time.perf_counter() - started, 1e-9)
    return _Loaded(len(chunks), tokens, seconds, time.process_time() - busy)
