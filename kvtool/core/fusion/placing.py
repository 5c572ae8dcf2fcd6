"""Places a layer's keys and values in the prompt's buffers, keys rotated: in main memory, or on a GPU.

On a GPU a separate CUDA stream does the work. Records are read into pinned memory and uploaded as their bytes are, in
one copy with the table that says where each one is; one launch rotates the keys and scatters all rows
(`kernels/rope_triton.py`). Without Triton, and for a model that rotates in another way, torch's operations do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np
import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.plan import Segment
from kvtool.core.kernels import rope_triton
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.kernels.rope_triton import Piece, Side
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.model.rope import Copy, Rotary


@dataclass(frozen=True)
class KeyRotation:
    """Rotation of a prompt's keys. `table`: cos and sin of all places of the prompt up to the last cached one.
    `in_one_launch`: one GPU kernel rotates and scatters keys (`Rotary.by_kernel`)."""

    rotary: Rotary
    table: RopeTables
    in_one_launch: bool = False

    def __call__(self, turns: Sequence[tuple[Copy, int]], beside: Sequence[Copy], layer: int) -> None:
        placed = [(out, keys, self.table[start : start + out.shape[2]]) for (out, keys), start in turns]
        self.rotary.place(placed, beside, layer)

    @cached_property
    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        (cos_sin,) = self.table.by_name.values()
        return cos_sin.cos[0], cos_sin.sin[0]


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
    faults of new pages. `pinned`: a copy for each block uploads it to a GPU."""

    def __init__(self, size: int, pinned: bool = False) -> None:
        self._size, self._pinned = min(size, _MOST), pinned
        self._blocks: list[_Block] = []
        self._current = 0

    def room(self, size: int) -> memoryview:
        """Allocate private, writable memory on a 64-byte boundary, valid until `clear`."""
        return self._room(size, self._size)

    def small(self, size: int) -> memoryview:
        return self._room(size, _LEAST)

    def _room(self, size: int, block_size: int) -> memoryview:
        while self._current < len(self._blocks):
            block = self._blocks[self._current]
            if block.used + size <= len(block.bytes):
                break
            self._current += 1
        else:
            block = _Block.of(max(size, block_size, 1), self._pinned)
            self._blocks.append(block)
        start = block.used
        block.used = min(len(block.bytes), -(-(start + size) // _ALIGN) * _ALIGN)
        return block.bytes[start : start + size]

    def clear(self) -> None:
        self._current = 0
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
    """Places a layer's un-rotated keys and values into the prompt's buffers in main memory, and rotates the keys once.
    Each belongs to one thread. `layer_bytes`: expected of a layer's records."""

    def __init__(self, layer_bytes: int) -> None:
        self.upload_s = self.rotate_s = 0.0
        self._memory = LayerMemory(layer_bytes)

    def seconds(self) -> tuple[float, float]:
        return self.upload_s, self.rotate_s

    def at_work(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def room(self, size: int) -> memoryview:
        """Allocate memory for a record of the layer that is placed next; a later one may reuse it."""
        return self._memory.room(size)

    def place(
        self,
        segments: Sequence[Segment],
        layers: Sequence[LayerKV],
        buffer: BufferLayer,
        rotation: KeyRotation,
        layer: int,
    ) -> int:
        """Place one layer, `layers` by segment, in one pass over its keys and values. Returns a mark for `wait`."""
        began = time.perf_counter()
        spans = [slice(segment.start, segment.stop) for segment in segments]
        turns = [
            ((buffer.keys[:, :, span], keys[None]), span.start) for span, (keys, _) in zip(spans, layers, strict=True)
        ]
        beside = [(buffer.values[:, :, span], values[None]) for span, (_, values) in zip(spans, layers, strict=True)]
        started = time.perf_counter()
        rotation(turns, beside, layer)
        self._memory.clear()
        self.rotate_s += time.perf_counter() - started
        self.upload_s += started - began
        return 0

    def wait(self, mark: int) -> None:
        """Let the calling thread's computations wait until the marked layer is placed."""

    def finish(self) -> None:
        """Wait until no source tensor is read any more."""


Moments: TypeAlias = "tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]"  # begun, uploaded, placed


def _between_s(begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


@dataclass(slots=True)
class _InFlight:
    """A layer until the stream has placed it. `read`: tensors that the stream reads."""

    staging: LayerMemory
    placed: torch.cuda.Event | None = None
    read: Sequence[LayerKV] = ()

    def free(self) -> None:
        if self.placed is not None:
            self.placed.synchronize()
        self.placed, self.read = None, ()
        self.staging.clear()


class CudaPlacing(Placing):
    """Places into buffers on a GPU, which were made and will be read in the stream `compute`. While one layer is
    uploaded, the next is read into another buffer."""

    def __init__(self, compute: torch.cuda.Stream, layer_bytes: int) -> None:
        super().__init__(layer_bytes)
        self._compute = compute
        self._stream = torch.cuda.Stream(compute.device)
        self._stream.wait_stream(compute)
        self._in_flight = [_InFlight(LayerMemory(layer_bytes, pinned=True)) for _ in range(2)]
        self._moments: list[Moments] = []

    def seconds(self) -> tuple[float, float]:
        """The device's seconds between events; staging in the thread counts as copying."""
        uploads = sum(_between_s(begun, uploaded) for begun, uploaded, _ in self._moments)
        return self.upload_s + uploads, sum(_between_s(uploaded, placed) for _, uploaded, placed in self._moments)

    def at_work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def room(self, size: int) -> memoryview:
        """Allocate pinned memory, that of the layer before the last."""
        return self._next().staging.room(size)

    def _next(self) -> _InFlight:
        flight = self._in_flight[0]
        if flight.placed is not None:
            flight.free()
        return flight

    def place(
        self,
        segments: Sequence[Segment],
        layers: Sequence[LayerKV],
        buffer: BufferLayer,
        rotation: KeyRotation,
        layer: int,
    ) -> int:
        started = time.perf_counter()
        flight = self._next()
        layers = _staged(layers, flight.staging)
        if all(side.is_cuda for kv in layers for side in kv):
            flight.staging.clear()  # these records were decoded on the device
        if rotation.in_one_launch and all(_fits(each, buffer) for each in layers):
            turns = rotation.flat if rotation.rotary.rotates(layer) else None
            moments = self._launch(segments, layers, buffer, turns, flight.staging)
        else:
            moments = self._put(segments, layers, buffer, partial(rotation, layer=layer), flight.staging)
        flight.read, flight.placed = layers, moments[2]
        self._in_flight.reverse()
        self._moments.append(moments)
        self.upload_s += time.perf_counter() - started
        return len(self._moments) - 1

    def place_held(
        self,
        segments: Sequence[Segment],
        layers: Sequence[Sequence[LayerKV]],
        buffers: Sequence[BufferLayer],
        rotation: KeyRotation,
    ) -> bool:
        """Place all layers held on the device, in the compute stream. False: nothing is, one needs more launches."""
        if not all(_fits(kv, buffer) for kvs, buffer in zip(layers, buffers, strict=True) for kv in kvs):
            return False
        started = time.perf_counter()
        self._in_flight[0].read = [kv for kvs in layers for kv in kvs]  # until it is waited for
        table = rope_triton.described(
            [
                Piece(Side.of(keys), Side.of(values), segment.start, segment.stop - segment.start)
                for kvs in layers
                for segment, (keys, values) in zip(segments, kvs, strict=True)
            ]
        )
        there = torch.from_numpy(table).to(buffers[0].keys.device, non_blocking=True)
        begun, uploaded, placed = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        begun.record(self._compute)
        uploaded.record(self._compute)
        for layer, buffer in enumerate(buffers):
            cos, sin = rotation.flat if rotation.rotary.rotates(layer) else (None, None)
            some = slice(layer * len(segments), (layer + 1) * len(segments))
            rope_triton.place(table[some], there[some], buffer.keys, buffer.values, cos, sin)
        placed.record(self._compute)
        self._in_flight[0].placed = placed
        self._moments.append((begun, uploaded, placed))
        self.upload_s += time.perf_counter() - started
        return True

    def wait(self, mark: int) -> None:
        self._moments[mark][2].wait()

    def finish(self) -> None:
        for flight in self._in_flight:
            flight.free()

    def _launch(
        self,
        segments: Sequence[Segment],
        layers: Sequence[LayerKV],
        buffer: BufferLayer,
        turns: tuple[torch.Tensor, torch.Tensor] | None,
        staging: LayerMemory,
    ) -> Moments:
        table = np.frombuffer(staging.small(8 * rope_triton.FIELDS * len(layers)), np.int64)
        targets = staging.targets(buffer.keys.device)
        addresses = [target.data_ptr() for target in targets]

        def side(numbers: torch.Tensor) -> Side:
            found = None if numbers.is_cuda else staging.find(numbers.data_ptr())
            return Side.of(numbers, None if found is None else addresses[found[0]] + found[1])

        pieces = [
            Piece(side(keys), side(values), segment.start, segment.stop - segment.start)
            for segment, (keys, values) in zip(segments, layers, strict=True)
        ]
        table[:] = rope_triton.described(pieces).reshape(-1)
        begun = self._now()
        staging.upload(targets)
        uploaded = self._now()
        found = staging.find(table.ctypes.data)
        assert found is not None
        there = targets[found[0]][found[1] : found[1] + table.nbytes]
        cos, sin = turns or (None, None)
        rope_triton.place(
            table.reshape(-1, rope_triton.FIELDS), there.view(torch.int64), buffer.keys, buffer.values, cos, sin
        )
        return begun, uploaded, self._now()

    def _put(
        self,
        segments: Sequence[Segment],
        layers: Sequence[LayerKV],
        buffer: BufferLayer,
        rotate: Callable[[Sequence[tuple[Copy, int]], Sequence[Copy]], None],
        staging: LayerMemory,
    ) -> Moments:
        """Place a layer by torch's operations; keys of neighbouring segments are rotated in one call."""
        begun = self._now()
        targets = staging.targets(buffer.keys.device)
        staging.upload(targets)
        uploaded = self._now()
        runs: list[tuple[int, int]] = []
        for segment, (keys, values) in zip(segments, layers, strict=True):
            buffer.keys[0, :, segment.start : segment.stop].copy_(_there(keys, staging, targets))
            buffer.values[0, :, segment.start : segment.stop].copy_(_there(values, staging, targets))
            if runs and runs[-1][1] == segment.start:
                runs[-1] = (runs[-1][0], segment.stop)
            else:
                runs.append((segment.start, segment.stop))
        spans = [(buffer.keys[:, :, start:stop], start) for start, stop in runs]
        rotate([((span, span), start) for span, start in spans], [])
        return begun, uploaded, self._now()

    def _now(self) -> torch.cuda.Event:
        moment = torch.cuda.Event(enable_timing=True)
        moment.record(self._stream)
        return moment


def _staged(layers: Sequence[LayerKV], staging: LayerMemory) -> Sequence[LayerKV]:
    """Return the layers on the device or in pinned memory; those in other memory are copied there, end to end."""
    strays = [layer for layer in layers if not all(side.is_cuda or staging.find(side.data_ptr()) for side in layer)]
    if not strays:
        return layers
    sides = [keys for keys, _ in strays], [values for _, values in strays]
    size = sum(side.nbytes for layer in strays for side in layer)
    room = torch.frombuffer(staging.room(size), dtype=strays[0][0].dtype)
    places = room.split([sum(side.numel() for side in some) for some in sides])
    brought = iter(zip(*(_end_to_end(*pair) for pair in zip(sides, places, strict=True)), strict=True))
    return [layer if all(layer is not stray for stray in strays) else next(brought) for layer in layers]


def _end_to_end(some: Sequence[torch.Tensor], room: torch.Tensor) -> Sequence[torch.Tensor]:
    sizes, (heads, _, head_dim) = [side.shape[1] for side in some], some[0].shape
    whole = room.view(heads, sum(sizes), head_dim)
    torch.cat(list(some), 1, out=whole)
    split: Sequence[torch.Tensor] = whole.split(sizes, 1)
    return split


def _fits(layer: LayerKV, buffer: BufferLayer) -> bool:
    keys, values = layer
    return rope_triton.fits(keys, buffer.keys) and rope_triton.fits(values, buffer.values)


def _there(numbers: torch.Tensor, staging: LayerMemory, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    found = None if numbers.is_cuda else staging.find(numbers.data_ptr())
    if found is None:
        return numbers
    block, start = found
    whole = targets[block][start:]
    whole = whole[: len(whole) // numbers.itemsize * numbers.itemsize].view(numbers.dtype)
    return whole.as_strided(numbers.shape, numbers.stride())
