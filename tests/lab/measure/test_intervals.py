"""Bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest

from kvtool.lab.measure import intervals
from kvtool.lab.measure.intervals import interval, ratio_interval


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1000])
def test_it_contains_the_mean_and_is_reproducible(count: int) -> None:
    values = list(np.random.default_rng(count).exponential(size=count))
    found = interval(values)
    assert found is not None
    low, high = found
    assert low <= np.mean(values) <= high
    assert (low < high) == (count > 1)
    assert interval(values) == found


def test_its_width_is_that_of_the_normal_approximation() -> None:
    values = np.random.default_rng(1).normal(5, 2, 400)
    found = interval(list(values))
    assert found is not None
    error = values.std() / 20
    assert found == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.15 * error)


def test_ratio() -> None:
    full = list(np.random.default_rng(2).uniform(0, 1, 200))
    assert ratio_interval([0.5 * value for value in full], full) == pytest.approx((0.5, 0.5))  # paired: nothing varies
    own = [value * random for value, random in zip(full, np.random.default_rng(3).uniform(0, 2, 200), strict=True)]
    found = ratio_interval(own, full)
    assert found is not None
    assert found[0] < sum(own) / sum(full) < found[1]


def test_nothing_to_say() -> None:
    assert interval([]) is None
    assert ratio_interval([], []) is None
    assert ratio_interval([0.0, 0.0], [0.0, 0.0]) is None
    assert ratio_interval([1.0, 0.0], [1.0, 0.0]) == (1.0, 1.0)  # resamples of nothing but zeros are left out


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [1.0, 2.0, 5.0, 9.0]
    whole = interval(values)
    monkeypatch.setattr(intervals, "_AT_ONCE", 40)
    assert interval(values) == whole
