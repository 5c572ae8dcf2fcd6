"""A layer's keys and values put into the prompt's buffers on a GPU, through pinned memory by a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.placing import Placing, Rotate
from kvtool.core.fusion.plan import Segment
from kvtool.core.model.prompt_cache import BufferLayer

_Span: TypeAlias = "tuple[torch.cuda.Event, torch.cuda.Event]"


def _elapsed_s(span: _Span) -> float:
    begun, ended = span
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


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
        self._uploads: list[_Span] = []
        self._turns: list[_Span] = []
        self._placed: list[torch.cuda.Event] = []

    def seconds(self) -> tuple[float, float]:
        """Of the device, between events; that of the thread, which only asks for it, is its staging."""
        return self.upload_s + sum(map(_elapsed_s, self._uploads)), sum(map(_elapsed_s, self._turns))

    def at_work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def wait(self, mark: int) -> None:
        self._placed[mark].wait()

    def _put(self, segments: Sequence[Segment], layers: Sequence[LayerKV], buffer: BufferLayer, rotate: Rotate) -> None:
        """Keys are turned in their place, neighbouring segments as one span, so that a layer rotates in few calls."""
        runs: list[tuple[int, int]] = []
        for segment, (keys, values) in zip(segments, layers, strict=True):
            buffer.keys[0, :, segment.start : segment.stop].copy_(keys)
            buffer.values[0, :, segment.start : segment.stop].copy_(values)
            if runs and runs[-1][1] == segment.start:
                runs[-1] = (runs[-1][0], segment.stop)
            else:
                runs.append((segment.start, segment.stop))
        begun = self._timed()
        spans = [(buffer.keys[:, :, start:stop], start) for start, stop in runs]
        rotate([((span, span), start) for span, start in spans], [])
        self._turns.append((begun, self._timed()))

    def _timed(self) -> torch.cuda.Event:
        """A moment of the stream."""
        moment = torch.cuda.Event(enable_timing=True)
        moment.record(self._stream)
        return moment

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
        staged = self._stage(here)
        begun = self._timed()
        staged = staged.to(device, non_blocking=True)
        self._uploads.append((begun, self._timed()))
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
