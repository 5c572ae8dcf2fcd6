"""Where a layer's coefficients stand in a row of numbers, and which blocks of 32 of them are coded.

A profile has one number of channels, that of a model's widest side: narrower ones end in zeros, which take no bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtool.core.codec.base import LayerKV, Shape, side_shapes

BLOCK = 32
SIDES = 2  # K, V


def channels_of(shapes: Sequence[Shape]) -> int:
    """Numbers of one token in the widest side of some layers."""
    return max(heads * dim for shape in shapes for heads, _, dim in side_shapes(shape))


def wide_sides(kv: LayerKV, channels: int) -> torch.Tensor:
    """Keys and values `[kv_heads, tokens, head_dim]` side by side, `[2, tokens, channels]`, filled up with zeros."""
    flat = [side.transpose(0, 1).flatten(1) for side in kv]
    if all(side.shape[1] == channels for side in flat):
        return torch.stack(flat)
    return torch.stack([torch.nn.functional.pad(side, (0, channels - side.shape[1])) for side in flat])


def heads_of(sides: torch.Tensor, shape: Shape) -> LayerKV:
    """Keys and values of a shape, as views of sides `[2, tokens, channels]`: inverse of `wide_sides`."""
    keys, values = (
        side[:, : heads * head_dim].unflatten(1, (heads, head_dim)).transpose(0, 1)
        for side, (heads, _, head_dim) in zip(sides, side_shapes(shape), strict=True)
    )
    return keys, values


@dataclass(frozen=True, slots=True)
class Layout:
    """A row holds K's groups, then V's; each group's coefficients are padded to whole blocks.

    Parameters
    ----------
    groups : parts of a side that are transformed by themselves: 1 (the whole layer) or one a KV head.
    size : channels of a group.
    """

    groups: int
    size: int

    @property
    def padded(self) -> int:
        """Columns of a group."""
        return -(-self.size // BLOCK) * BLOCK

    @property
    def stride(self) -> int:
        """Columns of a row: a multiple of 64."""
        return SIDES * self.groups * self.padded

    @property
    def channels(self) -> int:
        """Channels of a side."""
        return self.groups * self.size

    def start(self, side: int, group: int) -> int:
        """First column of a group."""
        return (side * self.groups + group) * self.padded

    def places(self, active: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.int32]:
        """First columns of the blocks that are coded, int32, an even number of them, ascending.

        Parameters
        ----------
        active : blocks of each group, uint8 `[2 * groups]`, K's groups first; None: all. One more is taken where
            the sum is odd: there is one, as all blocks together are even in number.
        """
        most = self.padded // BLOCK
        counts = np.full(SIDES * self.groups, most) if active is None else active.astype(np.int64)
        if counts.sum() % 2:
            counts[int(np.flatnonzero(counts < most)[0])] += 1
        blocks = [group * self.padded + BLOCK * np.arange(count) for group, count in enumerate(counts)]
        return np.concatenate(blocks).astype(np.int32)
