"""Where a layer's coefficients stand in a row of numbers, and which blocks of 32 of them are coded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK = 32
SIDES = 2  # K, V


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
