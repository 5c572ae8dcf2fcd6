"""A layer's keys and values put into the prompt's buffers, where the model computes in main memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.plan import Segment
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.model.rotary import Copy

# Keys to their places, each beginning at a prompt position, rotated to it; and what goes beside them as it is.
Rotate = Callable[[Sequence[tuple[Copy, int]], Sequence[Copy]], None]


class Placing:
    """Puts a layer's un-rotated keys and values into the prompt's buffers, and rotates the keys once.

    This one serves buffers in main memory. Each belongs to one thread.

    Attributes
    ----------
    upload_s, rotate_s : seconds that the thread has spent with both.
    """

    def __init__(self) -> None:
        self.upload_s = self.rotate_s = 0.0

    def seconds(self) -> tuple[float, float]:
        """What copying and rotating have taken."""
        return self.upload_s, self.rotate_s

    def at_work(self) -> AbstractContextManager[object]:
        """Within it, what the calling thread computes on a GPU is put where the placing itself works."""
        return contextlib.nullcontext()

    def place(self, segments: Sequence[Segment], layers: Sequence[LayerKV], buffer: BufferLayer, rotate: Rotate) -> int:
        """Place one layer.

        Returns
        -------
        A mark to give `wait`.
        """
        started, turning = time.perf_counter(), self.rotate_s
        with self.at_work():
            self._put(segments, self._brought(layers, buffer.keys.device), buffer, rotate)
            mark = self._mark()
        self.upload_s += time.perf_counter() - started - (self.rotate_s - turning)
        return mark

    def _put(self, segments: Sequence[Segment], layers: Sequence[LayerKV], buffer: BufferLayer, rotate: Rotate) -> None:
        """Rotated on their way, values beside them: all is read once and written once."""
        spans = [slice(segment.start, segment.stop) for segment in segments]
        turns = [
            ((buffer.keys[:, :, span], keys[None]), span.start) for span, (keys, _) in zip(spans, layers, strict=True)
        ]
        beside = [(buffer.values[:, :, span], values[None]) for span, (_, values) in zip(spans, layers, strict=True)]
        started = time.perf_counter()
        rotate(turns, beside)
        self.rotate_s += time.perf_counter() - started

    def wait(self, mark: int) -> None:
        """Let the calling thread's computations wait until what was placed is there."""

    def _brought(self, layers: Sequence[LayerKV], device: torch.device) -> Sequence[LayerKV]:
        """The layers where they can be copied from quickly."""
        return layers

    def _mark(self) -> int:
        return 0
