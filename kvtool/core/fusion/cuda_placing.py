"""Upload a layer's keys and values into the prompt's buffers on a GPU, in a CUDA stream of its own.

Records are read into pinned memory and cross as their bytes stand, in one copy with the table that says where each
lies; one launch rotates the keys and puts all into its place (`triton_place.py`). Without triton, and for a model that
rotates in its own way, torch's operations do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.placing import Placing, Turning
from kvtool.core.fusion.plan import Segment
from kvtool.core.kernels import rope_triton as triton_place
from kvtool.core.kernels.rope_triton import Piece, Side
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.model.rope import Copy

Moments: TypeAlias = "tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]"  # begun, uploaded, placed
_ALIGN = 64
_LEAST, _MOST = 2**16, 2**25  # bytes of a block, unless a record is larger: pinned memory comes in powers of two


@dataclass(slots=True)
class _Block:
    """Pinned memory in one piece, of which the first `used` bytes are given out."""

    memory: torch.Tensor
    address: int
    bytes: memoryview
    used: int = 0

    @classmethod
    def of(cls, size: int) -> _Block:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return cls(memory, memory.data_ptr(), memory.numpy().data)


class PinnedBuffer:
    """What one layer needs of pinned memory, given out piece by piece and brought to the device in a copy or a few.

    Parameters
    ----------
    size : bytes that a layer's records are expected to have.
    """

    def __init__(self, size: int) -> None:
        self._size = min(size, _MOST)
        self._blocks: list[_Block] = []
        self._current = 0

    def room(self, size: int) -> memoryview:
        """Private, writable, on a 64-byte boundary; until `clear`."""
        return self._room(size, self._size)

    def small(self, size: int) -> memoryview:
        """Room for what needs no memory for all records beside it."""
        return self._room(size, _LEAST)

    def _room(self, size: int, block_size: int) -> memoryview:
        while self._current < len(self._blocks):
            block = self._blocks[self._current]
            if block.used + size <= len(block.bytes):
                break
            self._current += 1
        else:
            block = _Block.of(max(size, block_size, 1))
            self._blocks.append(block)
        start = block.used
        block.used = min(len(block.bytes), -(-(start + size) // _ALIGN) * _ALIGN)
        return block.bytes[start : start + size]

    def clear(self) -> None:
        """All of it may be given out anew."""
        self._current = 0
        for block in self._blocks:
            block.used = 0

    def find(self, address: int) -> tuple[int, int] | None:
        """Number of the block in which an address of main memory lies, and its place there."""
        for number, block in enumerate(self._blocks):
            if block.address <= address < block.address + block.used:
                return number, address - block.address
        return None

    def targets(self, device: torch.device) -> list[torch.Tensor]:
        """Memory on the device for every block of which something was given out, uint8."""
        return [torch.empty(block.used, dtype=torch.uint8, device=device) for block in self._in_use]

    def upload(self, targets: list[torch.Tensor]) -> None:
        """Copy all that was given out; the copies read it until they are done."""
        for block, target in zip(self._in_use, targets, strict=True):
            target.copy_(block.memory[: block.used], non_blocking=True)

    @property
    def _in_use(self) -> list[_Block]:
        return self._blocks[: self._current + 1]


def _between_s(begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


@dataclass(slots=True)
class _Crossing:
    """What one of two layers on their way holds until the stream has placed it.

    Attributes
    ----------
    read : what the stream reads and the source might let go of.
    """

    staging: PinnedBuffer
    placed: torch.cuda.Event | None = None
    read: Sequence[LayerKV] = ()

    def free(self) -> None:
        """Wait until the layer stands in its place, and let go of it."""
        if self.placed is not None:
            self.placed.synchronize()
        self.placed, self.read = None, ()
        self.staging.clear()


class CudaPlacing(Placing):
    """Places into buffers on a GPU. While one layer crosses, the next is read into other memory.

    Parameters
    ----------
    compute : the stream in which the buffers were made and will be read.
    layer_bytes : what a layer's records are expected to have.
    """

    def __init__(self, compute: torch.cuda.Stream, layer_bytes: int) -> None:
        super().__init__()
        self._compute = compute
        self._stream = torch.cuda.Stream(compute.device)
        self._stream.wait_stream(compute)
        self._crossings = [_Crossing(PinnedBuffer(layer_bytes)) for _ in range(2)]
        self._moments: list[Moments] = []

    def seconds(self) -> tuple[float, float]:
        """Of the device, between events; that of the thread, which only asks for it, is its staging."""
        uploads = sum(_between_s(begun, uploaded) for begun, uploaded, _ in self._moments)
        return self.upload_s + uploads, sum(_between_s(uploaded, placed) for _, uploaded, placed in self._moments)

    def at_work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def room(self, size: int) -> memoryview:
        """Of pinned memory, where the layer before the last stood."""
        return self._next().staging.room(size)

    def _next(self) -> _Crossing:
        """The layer that is read or placed now."""
        crossing = self._crossings[0]
        if crossing.placed is not None:
            crossing.free()
        return crossing

    def place(
        self, segments: Sequence[Segment], layers: Sequence[LayerKV], buffer: BufferLayer, turning: Turning, layer: int
    ) -> int:
        started = time.perf_counter()
        crossing = self._next()
        layers = _staged(layers, crossing.staging)
        if all(side.is_cuda for kv in layers for side in kv):
            crossing.staging.clear()  # whatever was read there has gone another way
        if turning.in_one_launch and all(_fits(each, buffer) for each in layers):
            turns = turning.flat if turning.rotary.rotates(layer) else None
            moments = self._launch(segments, layers, buffer, turns, crossing.staging)
        else:
            moments = self._put(segments, layers, buffer, partial(turning, layer=layer), crossing.staging)
        crossing.read, crossing.placed = layers, moments[2]
        self._crossings.reverse()
        self._moments.append(moments)
        self.upload_s += time.perf_counter() - started
        return len(self._moments) - 1

    def place_held(
        self,
        segments: Sequence[Segment],
        layers: Sequence[Sequence[LayerKV]],
        buffers: Sequence[BufferLayer],
        turning: Turning,
    ) -> bool:
        """Place all layers from where they are held on the device, in the stream of the computing.

        Returns
        -------
        False: some of it does not fit one launch a layer; nothing was placed.
        """
        if not all(_fits(kv, buffer) for kvs, buffer in zip(layers, buffers, strict=True) for kv in kvs):
            return False
        started = time.perf_counter()
        self._crossings[0].read = [kv for kvs in layers for kv in kvs]  # until it is waited for
        table = triton_place.described(
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
            cos, sin = turning.flat if turning.rotary.rotates(layer) else (None, None)
            some = slice(layer * len(segments), (layer + 1) * len(segments))
            triton_place.place(table[some], there[some], buffer.keys, buffer.values, cos, sin)
        placed.record(self._compute)
        self._crossings[0].placed = placed
        self._moments.append((begun, uploaded, placed))
        self.upload_s += time.perf_counter() - started
        return True

    def wait(self, mark: int) -> None:
        self._moments[mark][2].wait()

    def finish(self) -> None:
        for crossing in self._crossings:
            crossing.free()

    def _launch(
        self,
        segments: Sequence[Segment],
        layers: Sequence[LayerKV],
        buffer: BufferLayer,
        turns: tuple[torch.Tensor, torch.Tensor] | None,
        staging: PinnedBuffer,
    ) -> Moments:
        """All in one copy and one launch."""
        table = np.frombuffer(staging.small(8 * triton_place.FIELDS * len(layers)), np.int64)
        targets = staging.targets(buffer.keys.device)
        addresses = [target.data_ptr() for target in targets]

        def side(numbers: torch.Tensor) -> Side:
            found = None if numbers.is_cuda else staging.find(numbers.data_ptr())
            return Side.of(numbers, None if found is None else addresses[found[0]] + found[1])

        pieces = [
            Piece(side(keys), side(values), segment.start, segment.stop - segment.start)
            for segment, (keys, values) in zip(segments, layers, strict=True)
        ]
        table[:] = triton_place.described(pieces).reshape(-1)
        begun = self._now()
        staging.upload(targets)
        uploaded = self._now()
        found = staging.find(table.ctypes.data)
        assert found is not None
        there = targets[found[0]][found[1] : found[1] + table.nbytes]
        cos, sin = turns or (None, None)
        triton_place.place(
            table.reshape(-1, triton_place.FIELDS), there.view(torch.int64), buffer.keys, buffer.values, cos, sin
        )
        return begun, uploaded, self._now()

    def _put(
        self,
        segments: Sequence[Segment],
        layers: Sequence[LayerKV],
        buffer: BufferLayer,
        rotate: Callable[[Sequence[tuple[Copy, int]], Sequence[Copy]], None],
        staging: PinnedBuffer,
    ) -> Moments:
        """Keys are turned in their place, neighbouring segments as one span, so that a layer rotates in few calls."""
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
        """A moment of the stream."""
        moment = torch.cuda.Event(enable_timing=True)
        moment.record(self._stream)
        return moment


def _staged(layers: Sequence[LayerKV], staging: PinnedBuffer) -> Sequence[LayerKV]:
    """The layers on the device or in pinned memory: those in other memory are brought there, end to end."""
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
    """Sides of several chunks `[kv_heads, tokens, head_dim]`, end to end in a piece of memory."""
    sizes, (heads, _, head_dim) = [side.shape[1] for side in some], some[0].shape
    whole = room.view(heads, sum(sizes), head_dim)
    torch.cat(list(some), 1, out=whole)
    split: Sequence[torch.Tensor] = whole.split(sizes, 1)
    return split


def _fits(layer: LayerKV, buffer: BufferLayer) -> bool:
    keys, values = layer
    return triton_place.fits(keys, buffer.keys) and triton_place.fits(values, buffer.values)


def _there(numbers: torch.Tensor, staging: PinnedBuffer, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor as it stands on the device, after its memory has crossed."""
    found = None if numbers.is_cuda else staging.find(numbers.data_ptr())
    if found is None:
        return numbers
    block, start = found
    whole = targets[block][start:]
    whole = whole[: len(whole) // numbers.itemsize * numbers.itemsize].view(numbers.dtype)
    return whole.as_strided(numbers.shape, numbers.stride())
