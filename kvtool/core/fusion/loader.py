"""Loads layers ahead of the compute: reads and decodes them, and places them in the prompt's buffers, keys rotated.

On a GPU a separate CUDA stream places them. Records are read into pinned memory and uploaded as their bytes are, in one
copy with the table that says where each one is; one launch rotates the keys and scatters all rows
(`kernels/rope_triton.py`). Without Triton, and for a model that rotates in another way, torch's operations do.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.common.types import Timeline, add_span
from kvtool.core.fusion.plan import Segment
from kvtool.core.fusion.source import KVSource, ReadStats, RecordMissing
from kvtool.core.kernels import placing_triton
from kvtool.core.kernels.placing_triton import Piece, Side
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import BufferLayer, PromptCache
from kvtool.core.model.rope import Copy, RopeJob, Rotary

_MOST_WORKERS = 4
_CORES_A_WORKER = 4  # the rest compute
_LOOKS = 0.02  # seconds between two looks at a slow record
_ENVELOPE_BYTES = 256  # at most, around a record's payload: header, alignment, and its line in a layer's table
_ALIGN = 64
_LEAST, _MOST = 2**16, 2**25  # bytes of a block, unless a record is larger: pinned memory comes in powers of two


def default_workers() -> int:
    return max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // _CORES_A_WORKER))


def positions_of(segments: Sequence[Segment], device: str) -> torch.Tensor:
    """The position of each place up to the last one of `segments`, int64 `[places]`."""
    positions = torch.arange(max((segment.stop for segment in segments), default=0), device=device)
    for segment in segments:
        if segment.position != segment.start or segment.placed_rows is not None:
            positions[segment.start : segment.stop] = torch.tensor(segment.positions)
    return positions


class Loader:
    """Fills a prompt cache in threads. Each thread takes the next layer; of a level, the most relevant chunk is first;
    every key is rotated once, to its absolute position. Without segments it has no threads.
    `workers`: number of threads. `patience`: seconds to wait for one record; None: no limit. `waited_s`: seconds that
    the compute waited."""

    def __init__(
        self,
        decoder: Decoder,
        segments: Sequence[Segment],
        cache: PromptCache,
        source: KVSource,
        timeline: Timeline | None = None,
        workers: int | None = None,
        patience: float | None = None,
    ) -> None:
        self.segments = sorted(segments, key=lambda segment: -segment.source.relevance)
        self.decoder, self.cache, self.waited_s = decoder, cache, 0.0
        self._lock = threading.Lock()
        workers = min(workers or default_workers(), decoder.stored_layers) if segments else 0
        if segments and decoder.device.startswith("cuda"):
            _ = self.table  # made by the compute stream, for which the streams of the threads wait
        self._placings = [_placing_for(decoder, segments) for _ in range(workers)]
        self._stats = [ReadStats(allocate=placing.allocate) for placing in self._placings]
        self._source, self._timeline, self._patience = source, timeline, patience
        self._layers = iter(range(decoder.stored_layers))  # which the threads share
        self._ready = [threading.Event() for _ in range(decoder.stored_layers)] if segments else []
        self._placed: dict[int, torch.cuda.Event] = {}
        self._error: BaseException | None = None
        self._stopped = self._given_up = False
        self._threads = [
            threading.Thread(target=self._run, args=worker, name="kvtool-loader", daemon=True)
            for worker in zip(self._placings, self._stats, strict=True)
        ]

    @property
    def table(self) -> RopeTables:
        """RoPE of all places up to the last loaded one, made at the first use."""
        with self._lock:
            return self._table

    @cached_property
    def _table(self) -> RopeTables:
        return self.decoder.rotary.table(positions_of(self.segments, self.decoder.device))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopped = True
        self._given_up = error is not None
        # A thread in the middle of a slow read ends after it; the buffers it fills are given up.
        slow = isinstance(error, RecordMissing) and error.stored
        for thread, placing in zip(self._threads, self._placings, strict=True):
            if not slow:
                thread.join()
            if self._given_up and not thread.is_alive():
                placing.finish()
        if not self._given_up:
            for event in self._placed.values():  # then nothing that was read is needed any more
                event.wait()

    def wait(self, layer: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until `layer` is in the buffers, and call `meanwhile` now and then. Raises a loading thread's error."""
        if self._ready and not self._ready[layer].is_set():
            started = time.perf_counter()
            while not self._ready[layer].wait(_LOOKS):
                meanwhile()
                self._give_up_slow()
            self.waited_s += add_span(self._timeline, "wait", started, layer=layer)
        if self._error is not None:
            raise self._error
        if (event := self._placed.pop(layer, None)) is not None:
            event.wait()

    @property
    def stats(self) -> ReadStats:
        return ReadStats(
            bytes_read=sum(stats.bytes_read for stats in self._stats),
            read_s=sum(stats.read_s for stats in self._stats),
            decode_s=sum(stats.decode_s for stats in self._stats),
        )

    def placing_s(self) -> tuple[float, float]:
        """Seconds of uploading and of rotating, of all threads together."""
        seconds = [placing.seconds() for placing in self._placings]
        return sum(upload for upload, _ in seconds), sum(rotate for _, rotate in seconds)

    def _give_up_slow(self) -> None:
        """Raise RecordMissing if reading a record exceeds the patience; decoding may take longer."""
        now = time.perf_counter()
        for reading in (stats.reading for stats in self._stats):
            if self._patience is not None and reading is not None and now - reading[1] >= self._patience:
                raise RecordMissing(reading[0], f"slow: not read within {self._patience:g} s", stored=True)

    def _run(self, placing: Placing, stats: ReadStats) -> None:
        try:
            with torch.inference_mode(), placing.at_work():
                for layer in self._layers:
                    self.load(layer, placing, stats)
                    self._ready[layer].set()
                    if self._stopped or self._error is not None:
                        break
        except BaseException as error:  # handed to the thread that waits
            self._error = error
            for ready in self._ready:
                ready.set()
        if self._given_up:
            placing.finish()

    def load(self, layer: int, placing: Placing, stats: ReadStats) -> None:
        """Read one layer and place it, in a thread."""
        started = time.perf_counter()
        layers = [*map(_part, self.segments, self._source.read(self.segments, layer, stats))]
        add_span(self._timeline, "read and decode", started, layer=layer)
        if self._stopped:
            return
        started = time.perf_counter()
        event = placing.place(self.segments, layers, self.cache.buffers[layer], self.table, layer)
        if event is not None:
            self._placed[layer] = event
        add_span(self._timeline, "upload and rotate", started, layer=layer)


def _part(segment: Segment, kv: LayerKV) -> LayerKV:
    if (part := segment.source.part) is None:
        return kv
    keys, values = (side[:, part.first : part.stop].contiguous() for side in kv)
    return keys, values


def _placing_for(decoder: Decoder, segments: Sequence[Segment]) -> Placing:
    tokens = sum(segment.stop - segment.start for segment in segments)
    widest = max(shape.numbers for shape in decoder.shapes)
    layer_bytes = widest * decoder.kv_dtype.itemsize * tokens + _ENVELOPE_BYTES * len(segments)
    if not decoder.device.startswith("cuda"):
        return Placing(decoder.rotary, layer_bytes)
    compute = torch.cuda.current_stream(decoder.device)
    stream = torch.cuda.Stream(compute.device)
    stream.wait_stream(compute)
    return CudaPlacing(decoder.rotary, layer_bytes, stream)


@dataclass(slots=True)
class _Block:
    memory: torch.Tensor
    address: int
    bytes: memoryview
    used: int = 0

    @classmethod
    def of(cls, size: int, pinned: bool) -> _Block:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return cls(memory, memory.data_ptr(), memory.numpy().data)


class LayerMemory:
    """A bump allocator for a layer's records, of about `size` bytes; the next layer takes the same memory, without the
    faults of new pages. `pinned`: a copy for each block uploads it to a GPU. `read`: further tensors that the GPU reads
    until it has `placed` the layer."""

    def __init__(self, size: int, pinned: bool = False) -> None:
        self._size, self._pinned = min(size, _MOST), pinned
        self._blocks: list[_Block] = []
        self._current = 0
        self.placed: torch.cuda.Event | None = None
        self.read: Sequence[LayerKV] = ()

    def allocate(self, size: int, block_size: int | None = None) -> memoryview:
        """Allocate private, writable memory on a 64-byte boundary, valid until `clear`; in a new block, of `block_size`
        bytes or more, if there is none."""
        while self._current < len(self._blocks):
            block = self._blocks[self._current]
            if block.used + size <= len(block.bytes):
                break
            self._current += 1
        else:
            block = _Block.of(max(size, self._size if block_size is None else block_size, 1), self._pinned)
            self._blocks.append(block)
        start = block.used
        block.used = min(len(block.bytes), -(-(start + size) // _ALIGN) * _ALIGN)
        return block.bytes[start : start + size]

    def clear(self) -> None:
        """Give all memory free, as soon as the layer is placed."""
        if self.placed is not None:
            self.placed.synchronize()
        self.placed, self.read, self._current = None, (), 0
        for block in self._blocks:
            block.used = 0

    def find(self, address: int) -> tuple[int, int] | None:
        """Return the block number and offset of an address; None if it is not in here."""
        for number, block in enumerate(self._blocks):
            if block.address <= address < block.address + block.used:
                return number, address - block.address
        return None

    def targets(self, device: torch.device) -> list[torch.Tensor]:
        return [torch.empty(block.used, dtype=torch.uint8, device=device) for block in self._in_use]

    def upload(self, targets: list[torch.Tensor]) -> None:
        for block, target in zip(self._in_use, targets, strict=True):
            target.copy_(block.memory[: block.used], non_blocking=True)

    @property
    def _in_use(self) -> list[_Block]:
        return self._blocks[: self._current + 1]


class Placing:
    """Places layers' un-rotated keys and values in the prompt's buffers in main memory, and rotates the keys once. Each
    belongs to one thread. `layer_bytes`: expected of a layer's records."""

    def __init__(self, rotary: Rotary, layer_bytes: int) -> None:
        self.upload_s = self.rotate_s = 0.0
        self._rotary, self._memory = rotary, LayerMemory(layer_bytes)

    def seconds(self) -> tuple[float, float]:
        return self.upload_s, self.rotate_s

    def at_work(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def allocate(self, size: int) -> memoryview:
        """Allocate memory for a record of the layer that is placed next; a later one may reuse it."""
        return self._memory.allocate(size)

    def place(
        self, segments: Sequence[Segment], layers: Sequence[LayerKV], buffer: BufferLayer, table: RopeTables, layer: int
    ) -> torch.cuda.Event | None:
        """Place one layer, `layers` by segment, in one pass over its keys and values. `table`: RoPE of all places up to
        the last one. Returns the event that a stream must wait for before it reads the layer."""
        started = time.perf_counter()
        jobs: list[RopeJob] = []
        copies: list[Copy] = []
        for segment, (keys, values) in zip(segments, layers, strict=True):
            span = slice(segment.start, segment.stop)
            jobs.append((buffer.keys[:, :, span], keys[None], table[span]))
            copies.append((buffer.values[:, :, span], values[None]))
        self._rotary.place(jobs, copies, layer)
        self._memory.clear()
        self.rotate_s += time.perf_counter() - started
        return None

    def finish(self) -> None:
        """Wait until no source tensor is read any more."""


# ---- on a GPU ----


Moments: TypeAlias = "tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]"  # begun, uploaded, placed


class CudaPlacing(Placing):
    """Places into buffers on a GPU, in `stream`. While one layer is uploaded, the next is read into another buffer."""

    def __init__(self, rotary: Rotary, layer_bytes: int, stream: torch.cuda.Stream) -> None:
        super().__init__(rotary, layer_bytes)
        self._stream, self._by_kernel = stream, rotary.by_kernel
        self._memories = [LayerMemory(layer_bytes, pinned=True) for _ in range(2)]
        self._moments: list[Moments] = []

    def seconds(self) -> tuple[float, float]:
        """The device's seconds between events; staging in the thread counts as copying."""
        for *_, placed in self._moments:
            placed.synchronize()
        uploads = sum(start_event.elapsed_time(uploaded) for start_event, uploaded, _ in self._moments)
        return self.upload_s + uploads / 1e3, sum(up.elapsed_time(placed) for _, up, placed in self._moments) / 1e3

    def at_work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def allocate(self, size: int) -> memoryview:
        """Allocate pinned memory, that of the layer before the last."""
        return self._staging().allocate(size)

    def _staging(self) -> LayerMemory:
        if self._memories[0].placed is not None:
            self._memories[0].clear()
        return self._memories[0]

    def place(
        self, segments: Sequence[Segment], layers: Sequence[LayerKV], buffer: BufferLayer, table: RopeTables, layer: int
    ) -> torch.cuda.Event:
        started = time.perf_counter()
        layers = _staged(layers, staging := self._staging())
        if all(side.is_cuda for kv in layers for side in kv):
            staging.clear()  # these records were decoded on the device
        by_kernel = self._by_kernel and _fits(layers, buffer)
        moments = (self._launch if by_kernel else self._put)(segments, layers, buffer, table, layer)
        staging.read, staging.placed = layers, moments[2]
        self._memories.reverse()
        self._moments.append(moments)
        self.upload_s += time.perf_counter() - started
        return moments[2]

    def finish(self) -> None:
        for memory in self._memories:
            memory.clear()

    def _launch(
        self, segments: Sequence[Segment], layers: Sequence[LayerKV], buffer: BufferLayer, table: RopeTables, layer: int
    ) -> Moments:
        """Place a layer in one launch; its records and the pieces' table cross in one copy."""
        staging = self._memories[0]
        shape = len(segments), placing_triton.FIELDS
        rows = np.frombuffer(staging.allocate(8 * math.prod(shape), _LEAST), np.int64).reshape(shape)
        targets = staging.targets(buffer.keys.device)
        addresses = [target.data_ptr() for target in targets]

        def side(numbers: torch.Tensor) -> Side:
            block = None if numbers.is_cuda else staging.find(numbers.data_ptr())
            return Side.of(numbers, None if block is None else addresses[block[0]] + block[1])

        pieces = [
            Piece(side(keys), side(values), segment.start, segment.stop - segment.start)
            for segment, (keys, values) in zip(segments, layers, strict=True)
        ]
        rows[:] = placing_triton.described(pieces)
        start_event = self._now()
        staging.upload(targets)
        uploaded = self._now()
        (angles,) = table.by_name.values()
        cos, sin = (angles.cos[0], angles.sin[0]) if self._rotary.rotates(layer) else (None, None)
        there = _there(torch.from_numpy(rows), staging, targets)
        placing_triton.place(rows, there, buffer.keys, buffer.values, cos, sin)
        return start_event, uploaded, self._now()

    def _put(
        self, segments: Sequence[Segment], layers: Sequence[LayerKV], buffer: BufferLayer, table: RopeTables, layer: int
    ) -> Moments:
        """Place a layer by torch's operations; keys of neighbouring segments are rotated in one call."""
        staging, start_event = self._memories[0], self._now()
        targets = staging.targets(buffer.keys.device)
        staging.upload(targets)
        uploaded = self._now()
        runs: list[slice] = []
        for segment, (keys, values) in zip(segments, layers, strict=True):
            buffer.keys[0, :, segment.start : segment.stop].copy_(_there(keys, staging, targets))
            buffer.values[0, :, segment.start : segment.stop].copy_(_there(values, staging, targets))
            start = runs.pop().start if runs and runs[-1].stop == segment.start else segment.start
            runs.append(slice(start, segment.stop))
        self._rotary.place([(buffer.keys[:, :, run], buffer.keys[:, :, run], table[run]) for run in runs], [], layer)
        return start_event, uploaded, self._now()

    def _now(self) -> torch.cuda.Event:
        moment = torch.cuda.Event(enable_timing=True)
        moment.record(self._stream)
        return moment


def _fits(layers: Sequence[LayerKV], buffer: BufferLayer) -> bool:
    """Tell whether one launch can place a layer's keys and values."""
    sides = ((side, there) for kv in layers for side, there in zip(kv, (buffer.keys, buffer.values), strict=True))
    return all(placing_triton.fits(side, there) for side, there in sides)


def _staged(layers: Sequence[LayerKV], staging: LayerMemory) -> Sequence[LayerKV]:
    """Copy layers that are neither on the device nor in pinned memory to pinned memory, end to end."""
    strays = [layer for layer in layers if not all(side.is_cuda or staging.find(side.data_ptr()) for side in layer)]
    if not strays:
        return layers
    sizes, staged = [keys.shape[1] for keys, _ in strays], []
    for sides in zip(*strays, strict=True):
        heads, _, head_dim = sides[0].shape
        memory = staging.allocate(sum(side.nbytes for side in sides))
        joined = torch.frombuffer(memory, dtype=sides[0].dtype).view(heads, sum(sizes), head_dim)
        torch.cat(sides, 1, out=joined)
        staged.append(joined.split(sizes, 1))
    pairs = zip(*staged, strict=True)
    return [next(pairs) if any(layer is stray for stray in strays) else layer for layer in layers]


def _there(numbers: torch.Tensor, staging: LayerMemory, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """The copy on the device of numbers in pinned memory; other numbers are there."""
    block = None if numbers.is_cuda else staging.find(numbers.data_ptr())
    if block is None:
        return numbers
    target, start = targets[block[0]], block[1]
    whole = target[start : len(target) - (len(target) - start) % numbers.itemsize].view(numbers.dtype)
    return whole.as_strided(numbers.shape, numbers.stride())
