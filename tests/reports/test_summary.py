"""Summaries of runs, the run that is recommended, and bootstrap intervals: arithmetic over rows, no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from kvtool.reports import summary
from kvtool.reports.summary import (
    RESAMPLES,
    SEED,
    Estimate,
    best,
    compared,
    difference,
    estimates,
    interval,
    ordered,
    overview,
    summarise,
)

Rows = dict[int, dict[str, dict[str, Any]]]
ALL = ("full", "reuse", "union:0.15")


def row(kl: float = 0.0, f1: float | None = None, contains: float = 0.0, recomputed: int = 0) -> dict[str, Any]:
    """A row of a journal; without `f1` that of a question without gold answers."""
    scores = {} if f1 is None else {"f1": f1, "exact_match": 0.0, "contains": contains}
    times = {"ttft_ms": 10.0, "speedup": 2.0, "bytes_read": 5, "holes": [], "levels": ["raw"]}
    counts = {"reused": 100 - recomputed, "recomputed": recomputed, "fresh": 7}
    distance = {"kl_first": kl / 2, "kl_answer": kl, "top1_agrees": True, "answer_equal": kl < 0.05}
    return {"answer": "", **scores, **times, **counts, **distance}


def questions(count: int = 40) -> Rows:
    random = np.random.default_rng(0)
    rows: Rows = {}
    for place in range(count):
        hard, right = float(random.uniform(0, 0.5)), float(place % 4 > 0)
        rows[place] = {
            "full": row(f1=0.4 + hard, contains=right, recomputed=100),
            "reuse": row(0.2 + hard, f1=0.1 + hard, contains=right * (place % 2)),
            "union:0.15": row(0.1 + hard, f1=0.3 + hard, contains=right, recomputed=15),
        }
    return rows


def by_name(rows: Mapping[int, Any], base: str = "") -> dict[str, dict[str, Any]]:
    return {summary["run"]: summary for summary in summarise(rows, base)}


def test_summary_of_a_run() -> None:
    found = by_name(questions(), "reuse")
    assert list(found) == ["full", "reuse", "union:0.15"]
    reuse, union = found["reuse"], found["union:0.15"]
    assert reuse["f1_difference"] == pytest.approx(-0.3)
    assert reuse["intervals"]["f1_difference"] == pytest.approx((-0.3, -0.3))  # the same of every question
    assert union["contains_difference"] == 0
    assert union["kl_answer_difference"] == pytest.approx(-0.1)
    assert union["kl_first_difference"] == pytest.approx(-0.05)
    for name, lacks in (("full", "difference"), ("reuse", "kl_answer_difference")):
        assert not [key for key in found[name] if lacks in key]
    assert [name for name in found if found[name]["pareto"]] == list(found)


def test_the_base_is_told_where_it_is_there() -> None:
    assert overview(questions(), "reuse")["kl_base"] == "reuse"
    assert overview(questions(), "epic:4")["kl_base"] is None
    assert not [key for key in by_name(questions(), "epic:4")["reuse"] if key.startswith("kl_answer_d")]


def test_pairs_are_of_the_questions_that_have_both() -> None:
    rows = questions(6)
    for place in (0, 1):
        del rows[place]["reuse"]
    rows[5] = {name: row(0.3) for name in ALL}  # no gold answers
    found = compared([rows[place] for place in range(6)], ALL, "reuse")
    have = [rows[place] for place in (2, 3, 4)]
    assert found["reuse"]["f1_difference"].value == pytest.approx(-0.3)
    wanted = [one["union:0.15"]["kl_answer"] - one["reuse"]["kl_answer"] for one in (*have, rows[5])]
    assert found["union:0.15"]["kl_answer_difference"].value == pytest.approx(np.mean(wanted))
    assert found["union:0.15"]["f1"].value == pytest.approx(np.mean([rows[p]["union:0.15"]["f1"] for p in range(5)]))


@pytest.mark.parametrize(
    ("bounds", "run", "within_limit"),
    [({"a": 0.04, "b": 0.01}, "a", True), ({"a": 0.5, "b": 0.04}, "b", True), ({"a": 0.5, "b": 0.4}, "b", False)],
)
def test_the_cheapest_that_is_near_enough_else_the_nearest(
    bounds: dict[str, float], run: str, within_limit: bool
) -> None:
    runs = [
        {"run": name, "recomputed_share": share, "kl_answer": bounds[name] / 2, "intervals": {"kl_answer": (0, high)}}
        for share, (name, high) in enumerate(bounds.items())
    ]
    full = {"run": "full", "recomputed_share": 9.0, "kl_answer": 0.0, "intervals": {"kl_answer": (0, 0)}}
    assert best([full, *runs], 0.05) == {"run": run, "within_limit": within_limit}
    assert best([full], 0.05) == {"run": None, "within_limit": False}


def test_order_of_runs() -> None:
    given = ["later:1", "union:0.5", "union:0.05", "union+shift=no:0.05", "epic:100", "epic:16", "full", "reuse"]
    expected = ["full", "reuse", "epic:16", "epic:100", "union:0.05", "union:0.5", "union+shift=no:0.05", "later:1"]
    assert ordered(given) == expected


# ---- intervals ----


def uniform(seed: int, count: int = 200) -> list[float]:
    return list(np.random.default_rng(seed).uniform(0, 1, count))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 7, 100, 1500])
def test_an_interval_contains_the_mean_and_is_reproducible(count: int) -> None:
    values = list(np.random.default_rng(count).exponential(size=count))
    found = interval(values)
    low, high = found
    assert low <= np.mean(values) <= high
    assert low < high
    assert interval(values) == found


def test_width_of_an_interval_is_that_of_the_normal_approximation() -> None:
    values = np.random.default_rng(1).normal(5, 2, 400)
    found = interval(list(values))
    error = values.std() / 20
    assert found == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.15 * error)


@pytest.mark.parametrize("count", [3, 40])
def test_an_interval_equals_that_of_collected_draws(count: int) -> None:
    """The plain way: draw, collect, average, a resample at a time."""
    values, random = np.random.default_rng(count).exponential(size=count), np.random.default_rng(SEED)
    means = np.array([values[random.integers(0, count, count)].mean() for _ in range(RESAMPLES)])
    assert interval(list(values)) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), rel=1e-9)


def test_differences_are_paired() -> None:
    """What makes questions unlike one another is in both runs, and makes their difference no less sure."""
    hard = [100 * value for value in uniform(2)]
    other = [value + 1 + noise for value, noise in zip(hard, uniform(3), strict=True)]
    found, none = estimates({"": difference(other, hard), "none": difference(hard, hard)}).values()
    assert found.value == pytest.approx(np.mean(other) - np.mean(hard))
    low, high = found.interval
    assert high - low < 0.1 < 1 < low
    alone = interval(other)
    assert alone[1] - alone[0] > 5
    assert none == Estimate(0.0, (0.0, 0.0))


def test_intervals_of_too_few_numbers() -> None:
    assert interval([]) is None
    assert interval([1.0]) is None
    assert estimates({"": [None, None]}) == {"": Estimate(None, None)}
    assert estimates({}) == {}


def test_questions_without_a_number_count_nowhere() -> None:
    """Also where other statistics of the same draws have one."""
    some = [1.0, None, 5.0, None]
    found = estimates({"some": some, "all": [1.0, 2.0, 5.0, 9.0], "both": difference(some, [0, 0, None, 0])})
    assert (found["some"].value, found["some"].interval) == (3.0, (1.0, 5.0))
    assert found["all"].value == 4.25
    assert found["both"] == Estimate(1.0, None)  # one question has both: it says nothing about others
    assert found["all"].interval == interval([1.0, 2.0, 5.0, 9.0])


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [1.0, 2.0, 5.0, 9.0]
    whole = interval(values)
    monkeypatch.setattr(summary, "_AT_ONCE", 40)
    assert interval(values) == whole
