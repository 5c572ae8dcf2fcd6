"""Frequency tables of the entropy coder: integers, never rebuilt from floating point numbers where a stream is read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvtool.core.errors import DamagedError

PROBABILITY_BITS = 11
SLOTS = 1 << PROBABILITY_BITS
ALPHABET = 256
ZERO = 128  # the symbol of the number 0
ESCAPE = 255  # the symbol of a number that the alphabet or a table has no symbol for
MAX_TABLES = 4096

_SYMBOL_BITS, _BIAS_AT = 8, 20


@dataclass(frozen=True, eq=False)
class TableSet:
    """Frequencies of symbols, uint16 `[tables, 256]`; every row sums to 2048. A frequency of 0: never coded.

    Raises
    ------
    DamagedError : a row with another sum, or none or too many rows.
    """

    frequencies: npt.NDArray[np.uint16]

    def __post_init__(self) -> None:
        rows = self.frequencies
        if rows.ndim != 2 or rows.shape[1] != ALPHABET or rows.dtype != np.uint16 or not 0 < len(rows) <= MAX_TABLES:
            raise DamagedError("a table set of the wrong shape")
        if (rows.sum(1, dtype=np.int64) != SLOTS).any():
            raise DamagedError(f"a frequency table that does not sum to {SLOTS}")

    def __len__(self) -> int:
        return len(self.frequencies)

    @cached_property
    def cumulative(self) -> npt.NDArray[np.uint16]:
        """Sum of the frequencies of smaller symbols, uint16 `[tables, 256]`."""
        sums = np.cumsum(self.frequencies, 1, dtype=np.int64)
        return (sums - self.frequencies).astype(np.uint16)

    @cached_property
    def slots(self) -> npt.NDArray[np.uint32]:
        """What a decoder looks up, uint32 `[tables * 2048]`: symbol | frequency << 8 | (slot - cumulative) << 20."""
        symbols = np.concatenate([np.repeat(np.arange(ALPHABET), row) for row in self.frequencies])
        tables = np.repeat(np.arange(len(self)), SLOTS)
        bias = np.tile(np.arange(SLOTS), len(self)) - self.cumulative[tables, symbols]
        entries = symbols | (self.frequencies[tables, symbols].astype(np.int64) << _SYMBOL_BITS) | (bias << _BIAS_AT)
        return np.asarray(entries, np.uint32)

    @cached_property
    def costs(self) -> npt.NDArray[np.float32]:
        """Bits of each symbol, float32 `[tables, 256]`; infinite where a table has no such symbol."""
        with np.errstate(divide="ignore"):
            return (PROBABILITY_BITS - np.log2(self.frequencies.astype(np.float64))).astype(np.float32)

    @cached_property
    def bounds(self) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int16]]:
        """Least and largest number that each table has a symbol for, int16 `[tables]`; between them it has all."""
        present = self.frequencies[:, :ESCAPE] > 0
        first = present.argmax(1)
        last = ESCAPE - 1 - present[:, ::-1].argmax(1)
        empty = ~present.any(1)  # then everything is an escape
        low, high = np.where(empty, 1, first - ZERO), np.where(empty, 0, last - ZERO)
        return low.astype(np.int16), high.astype(np.int16)

    @cached_property
    def digest(self) -> bytes:
        """blake2b-128 of the frequencies."""
        return hashlib.blake2b(self.frequencies.astype("<u2").tobytes(), digest_size=16).digest()


def quantised(probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    """Integer frequencies for one table: sum 2048, at least 1 wherever the probability is not 0.

    Largest remainders first, after 1 each; the sum is exact, so no symbol that may occur ever has none.

    Raises
    ------
    ValueError : no probability at all, or more symbols than slots.
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
