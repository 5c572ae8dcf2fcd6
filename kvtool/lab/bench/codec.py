"""The codec's speed on a store's own chunks, beside what bounds it, in the same run."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvtool.core.cache.store import Store
from kvtool.core.codec.base import NAMES
from kvtool.core.codec.rans import coder
from kvtool.core.common.machine import cores
from kvtool.core.common.progress import Events
from kvtool.core.kernels.linear.onednn import keep_freed_memory
from kvtool.core.session.identity import ProfileCache, store_identity
from kvtool.lab.bench.codec_tasks import Task, all_tasks
from kvtool.lab.bench.first_call import first_call_ms
from kvtool.lab.bench.machine import Host
from kvtool.lab.bench.sample import Sample
from kvtool.lab.bench.scratch import fit_to

_LEAST_SECONDS = 0.25  # of a measurement


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One measurement.

    Attributes
    ----------
    threads : of kvtool; torch and every other library has one in each.
    gb_per_s : raw 16-bit bytes of K and V, 10^9 a second, wall time: the median of the rounds. None: not measured.
    bits_per_element : all bytes of the records, their headers and digests included.
    raw_bytes, bytes : of the numbers, at 16 bit, and of what they are encoded to.
    flops_per_byte, gflop_per_s : of the transform alone: of a raw byte, and a second in plain products.
    """

    what: str
    level: str | None
    threads: int
    gb_per_s: float | None
    bits_per_element: float | None
    raw_bytes: int
    bytes: int | None
    batch: str
    flops_per_byte: float | None = None
    gflop_per_s: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class CodecBench:
    """All rows, and what they were measured on; `first_call_ms`: see first_call.py."""

    rows: tuple[CodecRow, ...]
    backend: str
    first_call_ms: float
    cores: int
    host: Host
    tokens: int
    chunks: int
    repeat: int
    model: str
    profile: str | None  # digest; None: one was fitted to these chunks
    decoded_to: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def entropy_coder(name: str | None) -> Iterator[str]:
    """Let entropy decoding and encoding run by this back-end (None: the one that would be taken) for a while.

    Raises
    ------
    UsageError : there is no such back-end here.
    """
    before = os.environ.get(coder.VARIABLE)
    if name is not None:
        os.environ[coder.VARIABLE] = name
    try:
        yield coder.chosen()
    finally:
        if name is not None:
            os.environ.pop(coder.VARIABLE)
        if before is not None:
            os.environ[coder.VARIABLE] = before


def bench_codec(
    store: Store,
    tokens: int,
    repeat: int,
    threads: int | None = None,
    coder: str | None = None,
    events: Events | None = None,
    dtype: str = "auto",
) -> CodecBench:
    """Measure with one thread and with `threads` (None: one a core), after one round that is not counted.

    Parameters
    ----------
    dtype : what lossy records are decoded to; `auto`: the store's own, as a query takes it.

    Raises
    ------
    UsageError : no such entropy coder here.
    KvtoolError : the store has no exact record.
    DamagedError : a record or the profile is damaged.
    """
    events = events or Events()
    identity = store_identity(store)
    profile = ProfileCache(store).current()
    most = threads or cores()
    keep_freed_memory()  # as loading a model does: two threads would wait for each other's fresh pages
    with entropy_coder(coder) as backend, _one_torch_thread():
        events.status("read the store's chunks")
        sample = Sample.of(store, tokens, leave_out=identity.prefix_id, decoded=dtype)
        events.status("encode them for every measurement")
        used = profile if profile is not None else fit_to(sample.chunks)
        with ThreadPoolExecutor(most) as pool:
            tasks = all_tasks(sample, used, pool)
        rows = list(_rows(tasks, repeat, tuple(dict.fromkeys((1, most))), events))
        events.status("start new processes")
        ready = first_call_ms(repeat)
    return CodecBench(
        rows=tuple(rows),
        backend=backend,
        first_call_ms=ready,
        cores=cores(),
        host=Host.here(most),
        tokens=sample.tokens,
        chunks=len(sample.chunks),
        repeat=repeat,
        model=identity.model,
        profile=profile.digest.hex() if profile is not None else None,
        decoded_to=NAMES[sample.decoded],
    )


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rows(tasks: Sequence[Task], repeat: int, thread_counts: Sequence[int], events: Events) -> Iterator[CodecRow]:
    """Every task once a round, so that a slow moment of the machine meets all of them."""
    runs = [(task, count) for task in tasks for count in thread_counts if count == 1 or task.threaded]
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
                often[number] = max(1, math.ceil(_LEAST_SECONDS / seconds[number][0])) if task.jobs else 1
                events.advance(1 / len(runs))
    finally:
        for pool in pools.values():
            pool.shutdown()
    for (task, count), times in zip(runs, seconds, strict=True):
        yield _row(task, count, statistics.median(times[1:]))


def _seconds(pool: ThreadPoolExecutor, threads: int, task: Task, times: int) -> float:
    """For one time of several: a thread that slept takes long to wake, on a virtual machine above all."""
    started = time.perf_counter()
    for _ in pool.map(_run, [list(task.jobs[first::threads]) * times for first in range(threads)]):
        pass
    return (time.perf_counter() - started) / times


def _run(jobs: Sequence[Callable[[], Any]]) -> None:
    """Run jobs one after another: handing each to a thread by itself would take longer than some of them."""
    for job in jobs:
        job()


def _row(task: Task, threads: int, seconds: float) -> CodecRow:
    measured = bool(task.jobs)
    return CodecRow(
        what=task.what,
        level=task.level,
        threads=threads,
        gb_per_s=task.raw_bytes / seconds / 1e9 if measured else None,
        bits_per_element=None if task.bytes is None else 16 * task.bytes / task.raw_bytes,
        raw_bytes=task.raw_bytes,
        bytes=task.bytes,
        batch=task.batch,
        flops_per_byte=task.flops / task.raw_bytes if task.flops else None,
        gflop_per_s=task.flops / seconds / 1e9 if task.flops else None,
        note=task.note,
    )
