"""What the streams of a layer have in common: the table of each column, and where its numbers go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.entropy.reference import BLOCK, LANES, MOST_CONTEXT, U16, U32, check_ids
from kvtool.core.codec.entropy.tables import ALPHABET, SLOTS, TableSet
from kvtool.core.native.job import address


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of streams: checked once, laid out for a kernel once, used for every stream that has them.

    Parameters
    ----------
    ids : table of each column, uint16 `[columns]`; columns are a multiple of 64.
    places : int32 `[columns / 32]`: at which column of an output each block of 32 begins; blocks do not overlap.
    refines : a symbol's context chooses among three tables, from its column's on.

    Raises
    ------
    DamagedError : a column that names no table, or not 64 lanes.
    ValueError : vectors of the wrong type or shape.
    """

    ids: U16
    tables: TableSet
    places: npt.NDArray[np.int32]
    refines: bool = False

    def __post_init__(self) -> None:
        for vector, dtype in ((self.ids, np.uint16), (self.places, np.int32)):
            if vector.ndim != 1 or vector.dtype != dtype:
                raise ValueError(f"vectors of {np.dtype(dtype)} are needed, not {vector.ndim}-D {vector.dtype}")
        if len(self.places) != len(self.ids) // BLOCK or (len(self.places) and int(self.places.min()) < 0):
            raise ValueError("a place for each 32 columns")
        if not self.places.flags.c_contiguous:
            raise ValueError("places are contiguous")
        check_ids(self.ids, self.tables, MOST_CONTEXT if self.refines else 0)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def groups(self) -> int:
        """Steps of a row: 64 columns each."""
        return len(self.ids) // LANES

    @cached_property
    def reach(self) -> int:
        """Columns that an output has at least."""
        return int(self.places.max()) + BLOCK if len(self.places) else 0

    @cached_property
    def numbers(self) -> npt.NDArray[np.int64]:
        """Where each column stands in a row of an output."""
        return columns_of(self.places)

    @cached_property
    def limits(self) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int16]]:
        """The least number of each column's table, and how many it has from there on: int16 `[columns]`."""
        low, high = self.tables.bounds
        return low[self.ids], (high - low + np.int16(1))[self.ids]

    @cached_property
    def held(self) -> Held:
        """What an encoder's kernels read, and where it is."""
        return Held.of(self)

    # ---- for kernels: who takes an address holds the array itself, as two threads may make one at the same time ----

    @cached_property
    def first_slots(self) -> U32:
        """The first slot of each column's table among all tables'."""
        return self.ids.astype(np.uint32) * np.uint32(SLOTS)

    @cached_property
    def first_entries(self) -> U32:
        """The first entry of each column's table among an encoder's, the last column first."""
        return self.ids[::-1].astype(np.uint32) * np.uint32(ALPHABET)


@dataclass(frozen=True, slots=True)
class Held:
    """Vectors of columns that an encoder's kernels read, and their addresses; whoever uses these holds the object.

    Attributes
    ----------
    places, low, many, first_entries : addresses.
    """

    places: int
    low: int
    many: int
    first_entries: int
    arrays: tuple[npt.NDArray[Any], ...]

    @classmethod
    def of(cls, columns: Columns) -> Held:
        """Those of some columns."""
        arrays = (columns.places, *columns.limits, columns.first_entries)
        places, low, many, first_entries = [address(array) for array in arrays]
        return cls(places, low, many, first_entries, arrays)


def columns_of(places: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Columns of the blocks that begin at `places`."""
    return (places[:, None].astype(np.int64) + np.arange(BLOCK)).reshape(-1)


def in_order(ids: U16, tables: TableSet, refines: bool = False) -> Columns:
    """Columns side by side."""
    return Columns(ids, tables, np.arange(0, len(ids), BLOCK, dtype=np.int32), refines)
