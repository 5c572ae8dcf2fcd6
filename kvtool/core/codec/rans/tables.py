"""Frequency tables, columns and streams of interleaved rANS.

64 lanes share one stream of 16-bit words. A lane's state is a uint32 in [2^16, 2^32). Symbols `[rows, columns]` are
coded row by row, 64 columns at a time, one a lane; `columns` is a multiple of 64. A symbol's table is that of its
column, plus its context where there are contexts. Every lane decodes a symbol by

    entry = slots[table * 2048 + (state & 2047)]
    state = frequency(entry) * (state >> 11) + bias(entry)
    if state < 2^16: state = state << 16 | next word          (lanes take words in ascending order)

A decoder starts with the stream's states and must end with 2^16 in every lane and no word left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtool.core.errors import DamagedError
from kvtool.core.native.jit import address

LANES = 64
LEAST_STATE = 1 << 16
BLOCK = 32  # columns that stay together
MOST_CONTEXT = 2  # a coarser number's size, capped

PROBABILITY_BITS = 11
SLOTS = 1 << PROBABILITY_BITS
ALPHABET = 256
ZERO = 128  # the symbol of the number 0
ESCAPE = 255  # the symbol of a number that the alphabet or a table has no symbol for
_MOST_TABLES = 4096
_SYMBOL_BITS, _BIAS_AT = 8, 20
CUMULATIVE_AT = 12
_MISSING = np.uint32(1 << 31 | 1)  # with a frequency, so that no kernel divides by 0

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
I16 = npt.NDArray[np.int16]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TableSet:
    """Frequencies of symbols, uint16 `[tables, 256]`; every row sums to 2048. A symbol of frequency 0 is never coded.

    Integers: no table is rebuilt from floating point numbers where a stream is read.

    Raises DamagedError: a row has another sum, or there are no rows or too many.
    """

    frequencies: U16

    def __post_init__(self) -> None:
        rows = self.frequencies
        if rows.ndim != 2 or rows.shape[1] != ALPHABET or rows.dtype != np.uint16 or not 0 < len(rows) <= _MOST_TABLES:
            raise DamagedError("a table set of the wrong shape")
        if (rows.sum(1, dtype=np.int64) != SLOTS).any():
            raise DamagedError(f"a frequency table that does not sum to {SLOTS}")

    def __len__(self) -> int:
        return len(self.frequencies)

    @cached_property
    def cumulative(self) -> U16:
        sums = np.cumsum(self.frequencies, 1, dtype=np.int64)
        return (sums - self.frequencies).astype(np.uint16)

    @cached_property
    def slots(self) -> U32:
        """Make a decoder's lookup, uint32 `[tables * 2048]`: symbol | frequency << 8 | (slot - cumulative) << 20."""
        symbols = np.concatenate([np.repeat(np.arange(ALPHABET), row) for row in self.frequencies])
        tables = np.repeat(np.arange(len(self)), SLOTS)
        bias = np.tile(np.arange(SLOTS), len(self)) - self.cumulative[tables, symbols]
        entries = symbols | (self.frequencies[tables, symbols].astype(np.int64) << _SYMBOL_BITS) | (bias << _BIAS_AT)
        return np.asarray(entries, np.uint32)

    @cached_property
    def encoder_entries(self) -> U32:
        """An encoder's lookup, uint32 `[tables * 256]`: frequency | cumulative << 12, or `_MISSING`."""
        frequencies = self.frequencies.astype(np.uint32)
        present = frequencies | self.cumulative.astype(np.uint32) << np.uint32(CUMULATIVE_AT)
        return np.where(frequencies == 0, _MISSING, present).reshape(-1)

    @cached_property
    def costs(self) -> npt.NDArray[np.float32]:
        """Compute the bits of each symbol, float32 `[tables, 256]`; infinite where a table lacks the symbol."""
        with np.errstate(divide="ignore"):
            return (PROBABILITY_BITS - np.log2(self.frequencies.astype(np.float64))).astype(np.float32)

    @cached_property
    def bounds(self) -> tuple[I16, I16]:
        """Find the least and largest number with a symbol, int16 `[tables]`; a table has all numbers between them."""
        present = self.frequencies[:, :ESCAPE] > 0
        first = present.argmax(1)
        last = ESCAPE - 1 - present[:, ::-1].argmax(1)
        empty = ~present.any(1)  # then everything is an escape
        low, high = np.where(empty, 1, first - ZERO), np.where(empty, 0, last - ZERO)
        return low.astype(np.int16), high.astype(np.int16)


def quantised(probabilities: npt.NDArray[np.float64]) -> U16:
    """Make one table's frequencies: sum 2048, at least 1 wherever the probability is not 0, largest remainders first.

    Raises ValueError: no probability is above 0, or more symbols have one than there are slots.
    """
    used = probabilities > 0
    count = int(used.sum())
    if not 0 < count <= SLOTS:
        raise ValueError("a table needs 1 to 2048 symbols")
    shares = probabilities / probabilities.sum() * (SLOTS - count)
    whole = np.floor(shares)
    left = int(SLOTS - count - whole.sum())
    order = np.argsort(whole - shares, kind="stable")[:left]
    whole[order] += 1
    return np.asarray(whole + used, np.uint16)


class DecoderAddresses(NamedTuple):
    """Addresses of the vectors that a kernel reads, and the vectors, which a caller holds meanwhile."""

    first_slots: int
    slots: int
    places: int
    arrays: tuple[npt.NDArray[Any], ...]


class EncoderAddresses(NamedTuple):
    low: int
    many: int
    first_entries: int
    arrays: tuple[npt.NDArray[Any], ...]


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of streams: checked once, laid out for a kernel once, used for every stream that has them.

    Raises DamagedError: a column names no table, or the columns do not fill 64 lanes; ValueError: a vector has the
    wrong type or shape.
    """

    ids: U16  # table of each column, uint16 `[columns]`; columns are a multiple of 64
    tables: TableSet
    places: I32  # int32 `[columns / 32]`: first column in an output of each block of 32; blocks do not overlap
    refines: bool = False  # a symbol's context chooses among three tables, from its column's on

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
        return len(self.ids) // LANES

    @cached_property
    def reach(self) -> int:
        return int(self.places.max()) + BLOCK if len(self.places) else 0

    @cached_property
    def numbers(self) -> npt.NDArray[np.int64]:
        return columns_of(self.places)

    # For kernels. A caller takes arrays and addresses together: two threads may make either at the same time.

    @cached_property
    def for_decoder(self) -> DecoderAddresses:
        arrays = (self.ids.astype(np.uint32) * np.uint32(SLOTS), self.tables.slots, self.places)
        first_slots, slots, places = map(address, arrays)
        return DecoderAddresses(first_slots, slots, places, arrays)

    @cached_property
    def for_encoder(self) -> EncoderAddresses:
        """The first entries are those of the last column first."""
        first_entries = self.ids[::-1].astype(np.uint32) * np.uint32(ALPHABET)
        low, high = self.tables.bounds
        arrays = (low[self.ids], (high - low + np.int16(1))[self.ids], first_entries)
        low_at, many_at, first_at = map(address, arrays)
        return EncoderAddresses(low_at, many_at, first_at, arrays)


def columns_of(places: I32) -> npt.NDArray[np.int64]:
    return (places[:, None].astype(np.int64) + np.arange(BLOCK)).reshape(-1)


def in_order(ids: U16, tables: TableSet, refines: bool = False) -> Columns:
    return Columns(ids, tables, np.arange(0, len(ids), BLOCK, dtype=np.int32), refines)


@dataclass(slots=True)  # frozen, making one would take twice as long; there is one for each record
class Stream:
    """An encoded stream: `words` uint16 in the order a decoder reads them, `states` uint32 `[64]` it starts with.

    `address`: of the words, which the states follow in memory.
    """

    words: U16
    states: U32
    address: int

    @classmethod
    def of(cls, words: U16, states: U32) -> Stream:
        size = len(words)
        whole = np.empty(size + 2 * len(states), np.uint16)
        whole[:size] = words
        whole[size:] = states.view(np.uint16)
        return cls(whole[:size], whole[size:].view(np.uint32), address(whole))


def check_ids(ids: U16, tables: TableSet, most_context: int) -> None:
    if len(ids) % LANES or (len(ids) and int(ids.max()) + most_context >= len(tables)):
        raise DamagedError("a column that names no table")
