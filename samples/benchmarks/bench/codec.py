"""Codec speed on a store's own chunks, with a copy and zstandard in the same run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from kvtool.core.cache.record import OVERHEAD_BYTES
from kvtool.core.cache.store import Store
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import DTYPES, NAMES, Encoded, shape_of_layer
from kvtool.core.codec.levels import LEVELS, NESTED, exact
from kvtool.core.codec.profile import Profile
from kvtool.core.common.machine import cores
from kvtool.core.common.types import Events
from kvtool.core.errors import KvtoolError
from kvtool.core.model.prefill import ChunkKV
from kvtool.core.native.isa import best_isa
from kvtool.core.records.read import exact_level, read_chunk
from kvtool.core.session.identity import ProfileCache, store_identity
from samples.benchmarks.bench.machine import Host
from samples.benchmarks.bench.prompts import fit_to

AT_ONCE = 16  # chunks that are decoded together
SIDE = "K or V of a layer of a chunk"
CHUNK = "all layers of a chunk"
MANY = f"a layer of {AT_ONCE} chunks"
_LEAST_SECONDS = 0.25  # of a measurement


Job = Callable[[], Any]


def bench_codec(
    store: Store,
    tokens: int,
    repeat: int,
    threads: int | None = None,
    events: Events | None = None,
    dtype: str = "auto",
) -> dict[str, Any]:
    """Measure with one thread and with `threads` (None: one a core), after one round that is not counted.

    Parameters
    ----------
    dtype : what lossy records are decoded to; `auto`: the store's own, as a query takes it.

    Returns
    -------
    The JSON of `bench codec`. `profile`: its digest; None: one was fitted to these chunks. `rows`: see `Task.row`.

    Raises
    ------
    KvtoolError : the store has no exact record.
    DamagedError : a record or the profile is damaged.
    """
    events = events or Events()
    identity = store_identity(store)
    profile = ProfileCache(store).current()
    most = threads or cores()
    with _one_torch_thread():
        events.status("read the store's chunks")
        sample = Sample.of(store, tokens, leave_out=identity.prefix_id, decoded=dtype)
        events.status("encode them for every measurement")
        used = profile if profile is not None else fit_to(sample.chunks)
        with ThreadPoolExecutor(most) as pool:
            tasks = all_tasks(sample, used, pool)
        rows = list(_rows(tasks, repeat, tuple(dict.fromkeys((1, most))), events))
    return {
        "rows": rows,
        "backend": str(best_isa()),
        "cores": cores(),
        "host": Host.here(most).to_json(),
        "tokens": sample.tokens,
        "chunks": len(sample.chunks),
        "repeat": repeat,
        "model": identity.model,
        "profile": profile.digest.hex() if profile is not None else None,
        "decoded_to": NAMES[sample.decoded],
    }


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rows(tasks: Sequence[Task], repeat: int, thread_counts: Sequence[int], events: Events) -> Iterator[dict[str, Any]]:
    """Run every task once a round, so that a slow moment of the machine meets all of them."""
    runs = [(task, count) for task in tasks for count in thread_counts]
    seconds: list[list[float]] = [[] for _ in runs]
    often = [1 for _ in runs]
    pools = {
        count: ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) for count in thread_counts
    }
    try:
        for _ in range(repeat + 1):
            for number, (task, count) in enumerate(runs):
                events.status(" ".join(filter(None, (task.what, task.level, f"{count} threads" if count > 1 else ""))))
                seconds[number].append(_seconds(pools[count], count, task, often[number]))
                often[number] = max(1, math.ceil(_LEAST_SECONDS / seconds[number][0]))
                events.advance(1 / len(runs))
    finally:
        for pool in pools.values():
            pool.shutdown()
    for (task, count), times in zip(runs, seconds, strict=True):
        yield task.row(count, statistics.median(times[1:]))


def _seconds(pool: ThreadPoolExecutor, threads: int, task: Task, times: int) -> float:
    """For one time of several: a thread that slept takes long to wake, on a virtual machine above all."""
    started = time.perf_counter()
    for _ in pool.map(_run, [list(task.jobs[first::threads]) * times for first in range(threads)]):
        pass
    return (time.perf_counter() - started) / times


def _run(jobs: Sequence[Callable[[], Any]]) -> None:
    """Run jobs one after another: to hand each to a thread would take longer than some of them."""
    for job in jobs:
        job()


@dataclass(frozen=True, slots=True)
class Task:
    """A measurement.

    Attributes
    ----------
    raw_bytes : of the numbers that the jobs go through, at 16 bit.
    bytes : of what these are encoded to.
    """

    what: str
    level: str | None
    jobs: Sequence[Job]
    raw_bytes: int
    bytes: int
    batch: str
    note: str = ""

    def row(self, threads: int, seconds: float) -> dict[str, Any]:
        """Make the JSON row of this measurement.

        `threads`: of kvtool; torch and every other library has one in each. `gb_per_s`: raw 16-bit bytes of K and V,
        10^9 a second, wall time: the median of the rounds. `bits_per_element`: of all bytes of the records, their
        headers and digests included.
        """
        return {
            "what": self.what,
            "level": self.level,
            "threads": threads,
            "gb_per_s": self.raw_bytes / seconds / 1e9,
            "bits_per_element": 16 * self.bytes / self.raw_bytes,
            "raw_bytes": self.raw_bytes,
            "bytes": self.bytes,
            "batch": self.batch,
            "note": self.note,
        }


def all_tasks(sample: Sample, profile: Profile, pool: ThreadPoolExecutor) -> list[Task]:
    """Make all tasks; `pool` makes their records."""
    tasks = [*_plain_tasks(sample, pool), *_lossless_tasks(sample, pool)]
    for level in NESTED:
        tasks += _lossy_tasks(sample, level, profile, pool)
    return tasks


# ---- what there is without kvtool --------------------------------------------------------------------------------


def _plain_tasks(sample: Sample, pool: ThreadPoolExecutor) -> Iterator[Task]:
    raws = [
        _raw(side[layer]) for layer in range(sample.layers) for kv in sample.chunks for side in (kv.keys, kv.values)
    ]
    copies: list[Job] = [partial(np.copyto, np.zeros_like(raw), raw) for raw in raws]
    yield Task("memcpy", None, copies, sample.raw_bytes, sample.raw_bytes, SIDE, note="into memory that is there")
    squeezed = list(pool.map(_zstd, raws))
    size = sum(map(len, squeezed))
    jobs: list[Job] = [partial(_zstd, raw) for raw in raws]
    yield Task("zstd -1 compress", None, jobs, sample.raw_bytes, size, SIDE)
    jobs = [partial(_unzstd, frame) for frame in squeezed]
    yield Task("zstd -1 decompress", None, jobs, sample.raw_bytes, size, SIDE)


def _raw(side: torch.Tensor) -> npt.NDArray[np.uint8]:
    return side.view(torch.uint8).numpy().reshape(-1)


def _zstd(raw: npt.NDArray[np.uint8]) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(raw.data)


def _unzstd(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame)


# ---- kvtool's levels ---------------------------------------------------------------------------------------------


def _lossless_tasks(sample: Sample, pool: ThreadPoolExecutor) -> Iterator[Task]:
    for level in (level for level in exact() if not LEVELS[level].verbatim):
        codec = CODECS[level]
        jobs: list[Job] = [partial(codec.encode_layers, kv.layers) for kv in sample.chunks]
        records = _encoded(jobs, sample, pool, sample.dtype)
        size = _size(records)
        yield Task("encode", level, jobs, sample.raw_bytes, size, CHUNK)
        jobs = [partial(codec.decode, batch, layer) for layer, batch in _batches(sample, records)]
        yield Task("decode", level, jobs, sample.raw_bytes, size, MANY)


def _lossy_tasks(sample: Sample, level: str, profile: Profile, pool: ThreadPoolExecutor) -> Iterator[Task]:
    codec, profiles = CODECS[level], {profile.digest: profile}.__getitem__
    jobs: list[Job] = [partial(codec.encode_layers, kv.layers, profile) for kv in sample.chunks]
    records = _encoded(jobs, sample, pool, sample.decoded)
    size, raw_bytes, note = _size(records), sample.raw_bytes, f"to {NAMES[sample.decoded]}"
    yield Task("encode", level, jobs, raw_bytes, size, CHUNK)
    jobs = [partial(codec.decode, batch, layer, profiles) for layer, batch in _batches(sample, records)]
    yield Task("decode", level, jobs, raw_bytes, size, MANY, note)
    count = len(sample.chunks)
    jobs = [partial(codec.decode_layers, records[chunk::count], profiles) for chunk in range(count)]
    yield Task("decode by chunk", level, jobs, raw_bytes, size, CHUNK, note)


# ---- records -----------------------------------------------------------------------------------------------------


def _encoded(jobs: Sequence[Job], sample: Sample, pool: ThreadPoolExecutor, dtype: torch.dtype) -> list[Encoded]:
    """Encode every layer of every chunk, layer by layer, to be decoded to `dtype`; a job encodes one chunk."""
    chunks = list(pool.map(lambda job: [b"".join(parts) for parts in job()], jobs))
    shapes = [shape_of_layer(chunk.layers[0]) for chunk in sample.chunks]
    return [
        Encoded(payload, shape, NAMES[dtype])
        for payloads in zip(*chunks, strict=True)
        for payload, shape in zip(payloads, shapes, strict=True)
    ]


def _batches(sample: Sample, records: Sequence[Encoded]) -> Iterator[tuple[int, Sequence[Encoded]]]:
    """Yield each layer with its records of the chunks that are decoded together."""
    count = len(sample.chunks)
    for layer in range(sample.layers):
        of_layer = records[layer * count : (layer + 1) * count]
        for first in range(0, count, AT_ONCE):
            yield layer, of_layer[first : first + AT_ONCE]


def _size(records: Sequence[Encoded]) -> int:
    return sum(len(record.payload) + OVERHEAD_BYTES for record in records)


@dataclass(frozen=True, slots=True)
class Sample:
    """Chunks whose numbers have 16 bit; those of a float32 store are rounded to bfloat16.

    Attributes
    ----------
    decoded : the dtype that lossy records are decoded to: the store's own, as a query takes it, or another's.
    """

    chunks: tuple[ChunkKV, ...]
    decoded: torch.dtype

    @classmethod
    def of(cls, store: Store, tokens: int, leave_out: bytes | None = None, decoded: str = "auto") -> Sample:
        """The first exact chunks, of about `tokens` tokens, one chunk at least.

        Parameters
        ----------
        decoded : name of the dtype that lossy records are decoded to; `auto`: the store's own.

        Raises
        ------
        KvtoolError : none is exact.
        DamagedError : a record is damaged.
        """
        found: list[ChunkKV] = []
        read = 0
        for chunk in store.chunk_ids():
            level, info = exact_level(store, chunk), store.chunk_info(chunk)
            if level is None or info is None or chunk == leave_out:
                continue
            if found and read + len(info.token_ids) > tokens:
                break
            kv = read_chunk(store, chunk, level, info.layers)
            own = kv.dtype
            found.append(ChunkKV(*([_of_16_bit(numbers) for numbers in side] for side in (kv.keys, kv.values))))
            read += len(info.token_ids)
        if not found:
            raise KvtoolError(
                "the store holds no exact chunk to measure on", "run `kvtool ingest PATH` with --level raw"
            )
        return cls(tuple(found), own if decoded == "auto" else DTYPES[decoded])

    @property
    def layers(self) -> int:
        return len(self.chunks[0].keys)

    @property
    def tokens(self) -> int:
        """The tokens of all chunks."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def channels(self) -> int:
        """Return the numbers that a token has in K, or in V, of a layer."""
        return self.chunks[0].keys[0].shape[0] * self.chunks[0].keys[0].shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.chunks[0].dtype

    @property
    def raw_bytes(self) -> int:
        """The bytes of K and V of all layers of all chunks, at 16 bit."""
        return 4 * self.layers * self.tokens * self.channels


def _of_16_bit(side: torch.Tensor) -> torch.Tensor:
    return (side if side.element_size() == 2 else side.to(torch.bfloat16)).contiguous()
