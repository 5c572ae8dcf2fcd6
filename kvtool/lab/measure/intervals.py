"""How sure a mean over questions is: percentile bootstrap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
CONFIDENCE = 0.95
SEED = 0
_AT_ONCE = 1 << 22  # numbers

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]


def interval(values: Sequence[float]) -> Interval | None:
    """Estimate the 95 % interval of the mean over questions; None where there are none."""
    return _bounds(np.asarray(values, np.float64)[:, None], lambda means: means[:, 0])


def ratio_interval(upper: Sequence[float], lower: Sequence[float]) -> Interval | None:
    """Estimate that of Σ upper / Σ lower, both by question and drawn together; None where Σ lower is 0."""
    pairs = np.asarray([upper, lower], np.float64).T
    return _bounds(pairs, lambda means: means[means[:, 1] > 0, 0] / means[means[:, 1] > 0, 1])


def _bounds(values: Floats, statistic: Callable[[Floats], Floats]) -> Interval | None:
    """Bound a statistic of resampled means, `[resamples, columns]`; `values` are `[questions, columns]`."""
    if not len(values):
        return None
    resampled = statistic(_resampled_means(values))
    if not len(resampled):
        return None
    low, high = np.percentile(resampled, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return float(low), float(high)


def _resampled_means(values: Floats) -> Floats:
    """Draw questions and average them, `[RESAMPLES, columns]`; every table of as many gets the same draws."""
    random = np.random.default_rng(SEED)
    count = len(values)
    step = max(1, _AT_ONCE // values.size)
    sizes = [min(step, RESAMPLES - start) for start in range(0, RESAMPLES, step)]
    return np.concatenate([values[random.integers(0, count, (size, count))].mean(1) for size in sizes])
