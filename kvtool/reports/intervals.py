"""Confidence intervals of means over questions."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 0
_FEWEST = 2  # numbers that an interval is of: one says nothing of how others would be
_AT_ONCE = 1 << 21  # numbers

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]
Column = Sequence[float | None]  # a number of every question; None: it has none, and counts nowhere
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over the questions with its 95 % interval; None without data. A single question has no interval."""

    value: float | None
    interval: Interval | None


def difference(own: Column, other: Column) -> Column:
    return [None if a is None or b is None else a - b for a, b in zip(own, other, strict=True)]


def estimates(columns: Mapping[K, Column]) -> dict[K, Estimate]:
    """Estimate the mean of each column: percentile bootstrap (Efron & Tibshirani 1993, ch. 13), paired by question.

    A resample takes a question with all that was measured of it, so that what makes one question harder than another
    does not make the difference of two runs unsure. All means are drawn together, as one product of matrices.
    """
    if not columns or not len(next(iter(columns.values()))):
        return {key: Estimate(None, None) for key in columns}
    means = _resampled_means(list(columns.values())).T
    return {key: _estimate(row, column) for (key, column), row in zip(columns.items(), means, strict=True)}


def interval(values: Sequence[float]) -> Interval | None:
    """Estimate the 95 % interval of the mean over questions; None where there are fewer than two."""
    return estimates({"": values})[""].interval


def _estimate(resampled: Floats, column: Column) -> Estimate:
    count = sum(value is not None for value in column)
    if count < _FEWEST:
        return Estimate(float(resampled[0]) if count else None, None)
    known = resampled[1:][np.isfinite(resampled[1:])]
    low, high = np.percentile(known, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Estimate(float(resampled[0]), (float(low), float(high)))


def _resampled_means(columns: Sequence[Column]) -> Floats:
    """Return means over the questions and over every resample, `[1 + RESAMPLES, columns]`; NaN without a number."""
    values = np.array([[np.nan if value is None else value for value in column] for column in columns], np.float64).T
    known = np.isfinite(values)
    masks, which = np.unique(known, axis=1, return_inverse=True)  # most columns lack the same questions
    table = np.hstack([np.where(known, values, 0.0), masks])
    sums = np.concatenate([table.sum(0)[None], *(block.astype(np.float64) @ table for block in _draws(len(values)))])
    counts = sums[:, len(columns) :][:, which.ravel()]
    with np.errstate(invalid="ignore"):
        return np.where(counts > 0, sums[:, : len(columns)] / counts, np.nan)


def _draws(count: int) -> Iterator[npt.NDArray[np.uint16]]:
    """Yield how often each resample has each question: `[resamples, count]`, in blocks; equal for equal counts."""
    random = np.random.default_rng(SEED)
    step = max(1, _AT_ONCE // count)
    for start in range(0, RESAMPLES, step):
        rows = min(step, RESAMPLES - start)
        placed = random.integers(0, count, (rows, count)) + count * np.arange(rows)[:, None]
        yield np.bincount(placed.ravel(), minlength=rows * count).reshape(rows, count).astype(np.uint16)
