"""Place a layer's keys and values in the prompt's buffers, keys rotated, where the model computes in main memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch

from kvtool.core.cache.buffers import aligned
from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.plan import Segment
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.model.prompt_cache import BufferLayer
from kvtool.core.model.rope import Copy, Rotary


@dataclass(frozen=True)
class Turning:
    """Puts positions on keys.

    Attributes
    ----------
    table : cos and sin of the positions of all places of the prompt up to the last cached one.
    in_one_launch : keys on a GPU can be rotated on their way (`Rotary.by_kernel`).
    """

    rotary: Rotary
    table: RopeTables
    in_one_launch: bool = False

    def __call__(self, turns: Sequence[tuple[Copy, int]], beside: Sequence[Copy], layer: int) -> None:
        """Rotate keys to their places, each run beginning at one; copy what goes beside them as it is."""
        placed = [(out, keys, self.table[start : start + out.shape[2]]) for (out, keys), start in turns]
        self.rotary.place(placed, beside, layer)

    @cached_property
    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the only RoPE, float32 `[tokens, rotary_dim]`."""
        (angles,) = self.table.by_name.values()
        return angles.cos[0], angles.sin[0]


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

    def room(self, size: int) -> memoryview:
        """Memory for a record of the layer that is read next; it may be used again for the next but one."""
        return aligned(size)

    def place(
        self, segments: Sequence[Segment], layers: Sequence[LayerKV], buffer: BufferLayer, turning: Turning, layer: int
    ) -> int:
        """Place one layer: rotated on their way, values beside them, all is read once and written once.

        Parameters
        ----------
        layers : keys and values of each segment, read since the layer before was placed.
        layer : its number.

        Returns
        -------
        A mark to give `wait`.
        """
        began = time.perf_counter()
        spans = [slice(segment.start, segment.stop) for segment in segments]
        turns = [
            ((buffer.keys[:, :, span], keys[None]), span.start) for span, (keys, _) in zip(spans, layers, strict=True)
        ]
        beside = [(buffer.values[:, :, span], values[None]) for span, (_, values) in zip(spans, layers, strict=True)]
        started = time.perf_counter()
        turning(turns, beside, layer)
        self.rotate_s += time.perf_counter() - started
        self.upload_s += started - began
        return 0

    def wait(self, mark: int) -> None:
        """Let the calling thread's computations wait until what was placed is there."""

    def finish(self) -> None:
        """Wait until nothing that was given is read any more."""
