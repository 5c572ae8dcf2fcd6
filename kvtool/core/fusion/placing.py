"""Places a layer's keys and values in the prompt's buffers, keys rotated: in main memory, or on a GPU.

On a GPU a separate CUDA stream does the work. Records are read into pinned memory and uploaded as their bytes are, in
one copy with the table that says where each one is; one launch rotates the keys and scatters all rows
(`kernels/rope_triton.py`). Without Triton, and for a model that rotates in another way, torch's operations do.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.plan import Segment
from kvtool.core.kernels import rope_triton
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.kernels.rope_triton import Piece, Side
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.model.rope import Copy, RopeJob, Rotary

_ALIGN = 64
_LEAST, _MOST = 2**16, 2**25  # bytes of a block, unless a record is larger: pinned memory comes in powers of two


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
        if self._by_kernel and fits(layers, buffer):
            moments = self._launch(segments, [layers], [buffer], table, layer)
        else:
            moments = self._put(segments, layers, buffer, table, layer)
        return self._placed(started, layers, moments)

    def place_all(
        self,
        segments: Sequence[Segment],
        layers: Sequence[Sequence[LayerKV]],
        buffers: Sequence[BufferLayer],
        table: RopeTables,
    ) -> None:
        """Place all layers, which are on the device and fit, with one table for all launches."""
        started = time.perf_counter()
        self._placed(started, [kv for kvs in layers for kv in kvs], self._launch(segments, layers, buffers, table))

    def _placed(self, started: float, read: Sequence[LayerKV], moments: Moments) -> torch.cuda.Event:
        self._memories[0].read, self._memories[0].placed = read, moments[2]
        self._memories.reverse()
        self._moments.append(moments)
        self.upload_s += time.perf_counter() - started
        return moments[2]

    def finish(self) -> None:
        for memory in self._memories:
            memory.clear()

    def _launch(
        self,
        segments: Sequence[Segment],
        layers: Sequence[Sequence[LayerKV]],
        buffers: Sequence[BufferLayer],
        table: RopeTables,
        first: int = 0,
    ) -> Moments:
        """Place layers from `first` on, in one launch each; their records and the pieces' table cross in one copy."""
        staging = self._memories[0]
        shape = len(layers), len(segments), rope_triton.FIELDS
        rows = np.frombuffer(staging.allocate(8 * math.prod(shape), _LEAST), np.int64).reshape(shape)
        targets = staging.targets(buffers[0].keys.device)
        addresses = [target.data_ptr() for target in targets]

        def side(numbers: torch.Tensor) -> Side:
            block = None if numbers.is_cuda else staging.find(numbers.data_ptr())
            return Side.of(numbers, None if block is None else addresses[block[0]] + block[1])

        pieces = [
            Piece(side(keys), side(values), segment.start, segment.stop - segment.start)
            for kvs in layers
            for segment, (keys, values) in zip(segments, kvs, strict=True)
        ]
        rows[:] = rope_triton.described(pieces).reshape(shape)
        start_event = self._now()
        staging.upload(targets)
        uploaded = self._now()
        (angles,) = table.by_name.values()
        turns = angles.cos[0], angles.sin[0]
        there = _there(torch.from_numpy(rows), staging, targets).unbind()
        for number, buffer in enumerate(buffers):
            cos, sin = turns if self._rotary.rotates(first + number) else (None, None)
            rope_triton.place(rows[number], there[number], buffer.keys, buffer.values, cos, sin)
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


def fits(layers: Sequence[LayerKV], buffer: BufferLayer) -> bool:
    """Tell whether one launch can place a layer's keys and values."""
    sides = ((side, there) for kv in layers for side, there in zip(kv, (buffer.keys, buffer.values), strict=True))
    return all(rope_triton.fits(side, there) for side, there in sides)


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
