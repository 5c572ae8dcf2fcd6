from __future__ import annotations

import numpy as np
import pytest

from kvtool.reports import intervals
from kvtool.reports.intervals import (
    RESAMPLES,
    SEED,
    Column,
    Estimate,
    Statistic,
    difference,
    estimates,
    interval,
    mean,
    ratio,
    recovered,
)


def estimate(statistic: Statistic) -> Estimate:
    return estimates({"": statistic})[""]


def uniform(seed: int, count: int = 200) -> list[float]:
    return list(np.random.default_rng(seed).uniform(0, 1, count))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 7, 100, 1500])
def test_it_contains_the_mean_and_is_reproducible(count: int) -> None:
    values = list(np.random.default_rng(count).exponential(size=count))
    found = interval(values)
    low, high = found
    assert low <= np.mean(values) <= high
    assert low < high
    assert interval(values) == found


def test_its_width_is_that_of_the_normal_approximation() -> None:
    values = np.random.default_rng(1).normal(5, 2, 400)
    found = interval(list(values))
    error = values.std() / 20
    assert found == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.15 * error)


@pytest.mark.parametrize("count", [3, 40])
def test_it_is_what_collecting_the_drawn_questions_gives(count: int) -> None:
    """The plain way: draw, collect, average, a resample at a time."""
    values, random = np.random.default_rng(count).exponential(size=count), np.random.default_rng(SEED)
    means = np.array([values[random.integers(0, count, count)].mean() for _ in range(RESAMPLES)])
    assert interval(list(values)) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), rel=1e-9)


def test_differences_are_paired() -> None:
    """What makes questions unlike one another is in both runs, and makes their difference no less sure."""
    hard = [100 * value for value in uniform(2)]
    other = [value + 1 + noise for value, noise in zip(hard, uniform(3), strict=True)]
    found = estimate(difference(other, hard))
    assert found.value == pytest.approx(np.mean(other) - np.mean(hard))
    low, high = found.interval
    assert high - low < 0.1 < 1 < low
    alone = interval(other)
    assert alone[1] - alone[0] > 5
    assert estimate(difference(hard, hard)) == Estimate(0.0, (0.0, 0.0))


def test_ratio() -> None:
    full = uniform(2)
    half = estimate(ratio([0.5 * value for value in full], full))  # paired: nothing varies
    assert (half.value, half.interval) == (pytest.approx(0.5), pytest.approx((0.5, 0.5)))
    own = [value * random for value, random in zip(full, np.random.default_rng(3).uniform(0, 2, 200), strict=True)]
    found = estimate(ratio(own, full))
    assert found.value == pytest.approx(sum(own) / sum(full))
    assert found.interval[0] < sum(own) / sum(full) < found.interval[1]


def test_what_a_run_recovers_of_the_gap() -> None:
    none, full = uniform(4), [value + 1 for value in uniform(5)]
    for share in (0.0, 0.25, 1.0, -0.5):
        own = [a + share * (b - a) for a, b in zip(none, full, strict=True)]
        found = estimate(recovered(own, none, full))
        assert (found.value, found.interval) == (pytest.approx(share), pytest.approx((share, share)))
    found = estimate(recovered(uniform(6), none, full))
    assert found.interval[0] < found.value < found.interval[1]


def test_where_there_is_no_gap_nothing_is_recovered() -> None:
    none = uniform(4)
    assert estimate(recovered(none, none, none)) == Estimate(None, None)
    assert estimate(recovered(none, [value + 1 for value in none], none)) == Estimate(None, None)
    unsure = [value + noise - 0.47 for value, noise in zip(none, uniform(7), strict=True)]  # above on average
    assert np.mean(unsure) > np.mean(none)
    assert estimate(recovered(none, none, unsure)) == Estimate(None, None)


def test_nothing_to_say() -> None:
    assert interval([]) is None
    assert interval([1.0]) is None
    assert estimate(ratio([], [])) == Estimate(None, None)
    assert estimate(ratio([0.0, 0.0], [0.0, 0.0])) == Estimate(None, None)
    assert estimate(ratio([1.0, 0.0], [1.0, 0.0])) == Estimate(1.0, (1.0, 1.0))  # resamples of nothing but zeros go
    assert estimate(mean([None, None])) == Estimate(None, None)
    assert estimates({}) == {}


def test_questions_without_a_number_count_nowhere() -> None:
    """Also where other statistics of the same draws have one."""
    some: Column = [1.0, None, 5.0, None]
    columns = {"some": mean(some), "all": mean([1.0, 2.0, 5.0, 9.0]), "both": difference(some, [0, 0, None, 0])}
    found = estimates(columns)
    assert (found["some"].value, found["some"].interval) == (3.0, (1.0, 5.0))
    assert found["all"].value == 4.25
    assert found["both"] == Estimate(1.0, None)  # one question has both: it says nothing about others
    assert found["all"].interval == interval([1.0, 2.0, 5.0, 9.0])


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [1.0, 2.0, 5.0, 9.0]
    whole = interval(values)
    monkeypatch.setattr(intervals, "_AT_ONCE", 40)
    assert interval(values) == whole
