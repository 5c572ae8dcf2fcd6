"""Confidence intervals of statistics: percentile bootstrap (Efron & Tibshirani 1993, ch. 13), paired by question.

A resample takes a question with all that was measured of it, so that what makes one question harder than another does
not make the difference of two runs unsure. All statistics of a report are drawn together, as one product of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 0
_UNSURE = 0.05  # of the resamples: a gap that is not there in more of them is no gap to recover
_FEWEST = 2  # numbers that an interval is of: one says nothing of how others would be
_AT_ONCE = 1 << 21  # numbers

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.uint16]
Interval = tuple[float, float]
Column = Sequence[float | None]  # a number of every question; None: it has none, and counts nowhere
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Statistic:
    """A function of the means of some columns (an array of means for each); NaN if it is undefined."""

    columns: tuple[Column, ...]
    of_means: Callable[..., Floats]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic of the questions with its 95 % interval; None without data. A single question has no interval."""

    value: float | None
    interval: Interval | None


# ---- statistics ----


def mean(values: Column) -> Statistic:
    return Statistic((values,), lambda means: means)


def difference(own: Column, other: Column) -> Statistic:
    return mean([None if a is None or b is None else a - b for a, b in zip(own, other, strict=True)])


def ratio(upper: Column, lower: Column) -> Statistic:
    """Take Σ upper / Σ lower; resamples whose Σ lower is 0 are left out."""
    return Statistic(_of_all(upper, lower), lambda above, below: np.where(below > 0, above / below, np.nan))


def recovered(own: Column, none: Column, full: Column) -> Statistic:
    """Take the share of the gap between no context and full context that a run recovers, of sums.

    (own − none) / (full − none): KVShareArena (arXiv 2609.10266) calls it PGR. Where the gap is not above 0, or in more
    than 5 % of the resamples, there is nothing to recover, and neither a share nor its interval.
    """

    def share(own: Floats, none: Floats, full: Floats) -> Floats:
        gap = full - none
        there = gap > 0
        shares = np.where(there, (own - none) / gap, np.nan)
        return shares if there.mean() >= 1 - _UNSURE and there[0] else np.full_like(gap, np.nan)

    return Statistic(_of_all(own, none, full), share)


def _of_all(*columns: Column) -> tuple[Column, ...]:
    rows = [row if None not in row else (None,) * len(row) for row in zip(*columns, strict=True)]
    return tuple([row[at] for row in rows] for at in range(len(columns)))


# ---- estimates ----


def estimates(statistics: Mapping[K, Statistic]) -> dict[K, Estimate]:
    columns = {id(column): column for statistic in statistics.values() for column in statistic.columns}
    if not columns or not len(next(iter(columns.values()))):
        return {key: Estimate(None, None) for key in statistics}
    means = dict(zip(columns, _resampled_means(list(columns.values())).T, strict=True))
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            key: _estimate(statistic.of_means(*(means[id(column)] for column in statistic.columns)), _count(statistic))
            for key, statistic in statistics.items()
        }


def interval(values: Sequence[float]) -> Interval | None:
    """Estimate the 95 % interval of the mean over questions; None where there are fewer than two."""
    return estimates({"": mean(values)})[""].interval


def _count(statistic: Statistic) -> int:
    return sum(None not in row for row in zip(*statistic.columns, strict=True))


def _estimate(resampled: Floats, count: int) -> Estimate:
    value, known = resampled[0], resampled[1:][np.isfinite(resampled[1:])]
    if not np.isfinite(value):
        return Estimate(None, None)
    if count < _FEWEST:
        return Estimate(float(value), None)
    low, high = np.percentile(known, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Estimate(float(value), (float(low), float(high)))


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


# ---- draws ----


def _draws(count: int) -> Iterator[Counts]:
    """Yield how often each resample has each question: `[resamples, count]`, in blocks; equal for equal counts."""
    random = np.random.default_rng(SEED)
    step = max(1, _AT_ONCE // count)
    for start in range(0, RESAMPLES, step):
        rows = min(step, RESAMPLES - start)
        placed = random.integers(0, count, (rows, count)) + count * np.arange(rows)[:, None]
        yield np.bincount(placed.ravel(), minlength=rows * count).reshape(rows, count).astype(np.uint16)
