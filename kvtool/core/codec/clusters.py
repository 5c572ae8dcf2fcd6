"""Few frequency tables for many columns: k-means, the distance being the bits that a table costs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtool.core.codec.entropy.tables import ALPHABET, ESCAPE, PROBABILITY_BITS, ZERO, quantised
from kvtool.core.codec.parametric import bell, frequencies

TABLES = 48
FINE_CLASSES = 16
_ROUNDS = 8
_MOST_COLUMNS = 20_000  # that the tables are fitted to; all are given one
_SMOOTHING = 0.02  # share of a bell of the same spread: another text has numbers that the sample did not

Counts = npt.NDArray[np.int32]
Tables = npt.NDArray[np.uint16]


def shared_tables(counts: Counts, most: int = TABLES) -> tuple[Tables, npt.NDArray[np.uint16]]:
    """Tables for columns by what occurred in them, `[columns, 256]`; and the id of each column's, uint16."""
    rows = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    sample = rows[:: -(-len(rows) // _MOST_COLUMNS)]
    groups = _start(sample, min(most, len(sample)))
    for _ in range(_ROUNDS):
        tables = np.stack([_table(sample[groups == group]) for group in range(groups.max() + 1)])
        groups = _nearest(sample, tables)
        groups = np.unique(groups, return_inverse=True)[1]  # those that lost all their columns go
    tables = np.stack([_table(sample[groups == group]) for group in range(groups.max() + 1)])
    return tables, _nearest(rows, tables).astype(np.uint16)


def _start(rows: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Columns of like entropy together."""
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(rows * np.log2(rows), 1)
    groups = np.empty(len(rows), np.int64)
    groups[np.argsort(entropy, kind="stable")] = np.arange(len(rows)) * count // len(rows)
    return groups


def _nearest(rows: npt.NDArray[np.float64], tables: Tables) -> npt.NDArray[np.int64]:
    with np.errstate(divide="ignore"):
        bits = PROBABILITY_BITS - np.log2(tables.astype(np.float64))
    escape = bits[:, ESCAPE, None] + 16
    return np.asarray((rows @ np.where(np.isfinite(bits), bits, escape).T).argmin(1))


def _table(rows: npt.NDArray[np.float64]) -> Tables:
    mean = rows.mean(0)
    inside = mean.copy()
    inside[ESCAPE] = 0.0
    numbers = np.arange(ALPHABET) - ZERO
    total = max(inside.sum(), 1e-9)
    spread = float(np.sqrt(max((inside * numbers**2).sum() / total, 1e-3)))
    return frequencies((1 - _SMOOTHING) * mean + _SMOOTHING * bell(spread))


def fine_tables(counts: Counts) -> tuple[Tables, npt.NDArray[np.int64]]:
    """Tables of a refinement, three a class, for columns `[columns, context, -1 | 0 | 1]`; and each column's first."""
    some = counts + 0.5
    share = some[:, 0, 1] / some[:, 0].sum(1)  # of zeros that stay zeros: tells narrow columns from wide ones
    order = np.argsort(share, kind="stable")
    classes = np.empty(len(counts), np.int64)
    classes[order] = np.arange(len(counts)) * FINE_CLASSES // len(counts)
    tables = []
    for number in range(classes.max() + 1):
        for context in range(3):
            table = np.zeros(ALPHABET)
            table[ZERO - 1 : ZERO + 2] = some[classes == number, context].sum(0)
            tables.append(quantised(table))
    return np.stack(tables), classes * 3
