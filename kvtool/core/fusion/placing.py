"""Loaded layers on their way into the prompt's buffers: on the CPU at once, on a GPU through pinned memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.plan import Segment
from kvtool.core.model.prompt_cache import BufferLayer

Rotate = Callable[[torch.Tensor, int, int], torch.Tensor]


class Placing:
    """Puts a layer's un-rotated keys and values into the prompt's buffers, and rotates the keys once.

    This one serves buffers in main memory. Each belongs to one thread.

    Attributes
    ----------
    upload_s, rotate_s : seconds that both have taken.
    """

    def __init__(self) -> None:
        self.upload_s = self.rotate_s = 0.0

    def at_work(self) -> AbstractContextManager[object]:
        """Within it, what the calling thread computes on a GPU is put where the placing itself works."""
        return contextlib.nullcontext()

    def place(self, segments: Sequence[Segment], layers: Sequence[LayerKV], buffer: BufferLayer, rotate: Rotate) -> int:
        """Place one layer; `rotate(keys, start, stop)` gives the keys of prompt positions start … stop - 1.

        Returns
        -------
        A mark to give `wait`.
        """
        started = time.perf_counter()
        with self.at_work():
            for segment, (keys, values) in zip(segments, self._brought(layers, buffer.keys.device), strict=True):
                buffer.keys[0, :, segment.start : segment.stop].copy_(keys)
                buffer.values[0, :, segment.start : segment.stop].copy_(values)
            uploaded = time.perf_counter()
            _rotate_all(segments, buffer, rotate)
            mark = self._mark()
        self.upload_s += uploaded - started
        self.rotate_s += time.perf_counter() - uploaded
        return mark

    def wait(self, mark: int) -> None:
        """Let the calling thread's computations wait until what was placed is there."""

    def _brought(self, layers: Sequence[LayerKV], device: torch.device) -> Sequence[LayerKV]:
        """The layers where they can be copied from quickly."""
        return layers

    def _mark(self) -> int:
        return 0


class CudaPlacing(Placing):
    """Places into buffers on a GPU, by a stream of its own: from one pinned buffer of one layer's size, or from where a
    codec has decoded them.

    Parameters
    ----------
    compute : the stream in which the buffers were made and will be read.
    """

    def __init__(self, compute: torch.cuda.Stream) -> None:
        super().__init__()
        self._stream = torch.cuda.Stream(compute.device)
        self._stream.wait_stream(compute)
        self._pinned = torch.empty(0)
        self._copied = torch.cuda.Event()
        self._placed: list[torch.cuda.Event] = []

    def at_work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def wait(self, mark: int) -> None:
        self._placed[mark].wait()

    def _mark(self) -> int:
        done = torch.cuda.Event()
        done.record(self._stream)
        self._placed.append(done)
        return len(self._placed) - 1

    def _brought(self, layers: Sequence[LayerKV], device: torch.device) -> list[LayerKV]:
        """The layers on the device; those in main memory cross together."""
        here = [layer for layer in layers if not layer[0].is_cuda]
        if not here:
            return list(layers)
        self._copied.synchronize()  # the pinned buffer still held the layer before
        staged = self._stage(here).to(device, non_blocking=True)
        self._copied.record(self._stream)
        sizes = [keys.shape[1] for keys, _ in here]
        crossed = iter(zip(*(side.split(sizes, 1) for side in staged), strict=True))
        return [layer if layer[0].is_cuda else next(crossed) for layer in layers]

    def _stage(self, layers: Sequence[LayerKV]) -> torch.Tensor:
        """All segments end to end in pinned memory, `[2, kv_heads, tokens, head_dim]`."""
        keys, _ = layers[0]
        tokens = sum(key.shape[1] for key, _ in layers)
        shape = (2, keys.shape[0], tokens, keys.shape[2])
        if self._pinned.shape != shape or self._pinned.dtype != keys.dtype:
            self._pinned = torch.empty(shape, dtype=keys.dtype, pin_memory=True)
        torch.cat([key for key, _ in layers], 1, out=self._pinned[0])
        torch.cat([value for _, value in layers], 1, out=self._pinned[1])
        return self._pinned


def _rotate_all(segments: Sequence[Segment], buffer: BufferLayer, rotate: Rotate) -> None:
    """Every key once, in place; neighbouring segments as one span, so that a layer rotates in few calls."""
    runs: list[tuple[int, int]] = []
    for segment in segments:
        if runs and runs[-1][1] == segment.start:
            runs[-1] = (runs[-1][0], segment.stop)
        else:
            runs.append((segment.start, segment.stop))
    for start, stop in runs:
        span = buffer.keys[:, :, start:stop]
        span.copy_(rotate(span, start, stop))
