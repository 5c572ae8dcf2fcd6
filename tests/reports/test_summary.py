"""Runs held against one another, and a run chosen on half of the questions: arithmetic over rows, no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from kvtool.reports.summary import by_full, cheapest, compared, holdout, nearest, overview, summarise

Rows = dict[int, dict[str, dict[str, Any]]]
ALL = ("full", "none", "reuse", "union:0.15")


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
            "none": row(2.0, f1=hard, recomputed=100),
            "reuse": row(0.2 + hard, f1=0.1 + hard, contains=right * (place % 2)),
            "union:0.15": row(0.1 + hard, f1=0.3 + hard, contains=right, recomputed=15),
        }
    return rows


def by_name(rows: Mapping[int, Any], base: str = "") -> dict[str, dict[str, Any]]:
    return {summary["run"]: summary for summary in summarise(rows, base)}


def test_what_is_told_of_a_run() -> None:
    found = by_name(questions(), "reuse")
    assert list(found) == ["full", "reuse", "union:0.15", "none"]
    reuse, union = found["reuse"], found["union:0.15"]
    assert reuse["f1_difference"] == pytest.approx(-0.3)
    assert reuse["intervals"]["f1_difference"] == pytest.approx((-0.3, -0.3))  # the same of every question
    assert union["contains_difference"] == 0
    assert (reuse["pgr_f1"], union["pgr_f1"]) == (pytest.approx(0.25), pytest.approx(0.75))
    assert union["intervals"]["pgr_f1"] == pytest.approx((0.75, 0.75))
    assert (reuse["pgr_contains"], union["pgr_contains"]) == (pytest.approx(2 / 3), 1)
    assert union["kl_answer_difference"] == pytest.approx(-0.1)
    assert union["kl_first_difference"] == pytest.approx(-0.05)
    for name, lacks in (("full", "difference"), ("reuse", "kl_answer_difference"), ("none", "kl_answer_difference")):
        assert not [key for key in found[name] if lacks in key]
    assert not [key for name in ("full", "none") for key in found[name] if "pgr" in key]
    assert [name for name in found if found[name]["pareto"]] == ["full", "reuse", "union:0.15"]


def test_the_base_is_told_where_it_is_there() -> None:
    assert overview(questions(), "reuse")["kl_base"] == "reuse"
    assert overview(questions(), "epic:4")["kl_base"] is None
    assert not [key for key in by_name(questions(), "epic:4")["reuse"] if key.startswith("kl_answer_d")]


def test_questions_that_full_answers_wrongly_stand_apart() -> None:
    rows = [questions()[place] for place in range(40)]
    found = by_full(rows, "reuse")
    assert (found["full_right"]["count"], found["full_wrong"]["count"]) == (30, 10)
    assert found["full_right"]["contains"] == pytest.approx(2 / 3)
    assert found["full_wrong"]["contains"] == 0
    assert found["full_wrong"]["f1"] == pytest.approx(np.mean([row["reuse"]["f1"] for row in rows[::4]]))
    assert by_full(rows, "full")["full_right"]["contains"] == 1
    assert by_full([{"full": row(), "reuse": row()}], "reuse") == {}


def test_pairs_are_of_the_questions_that_have_both() -> None:
    rows = questions(6)
    for place in (0, 1):
        del rows[place]["none"]
        del rows[place]["reuse"]
    rows[5] = {name: row(0.3) for name in ALL}  # no gold answers
    found = compared([rows[place] for place in range(6)], ALL, "reuse")
    have = [rows[place] for place in (2, 3, 4)]
    assert found["reuse"]["f1_difference"].value == pytest.approx(-0.3)
    wanted = [one["union:0.15"]["kl_answer"] - one["reuse"]["kl_answer"] for one in (*have, rows[5])]
    assert found["union:0.15"]["kl_answer_difference"].value == pytest.approx(np.mean(wanted))
    assert found["union:0.15"]["pgr_f1"].value == pytest.approx(0.75)
    assert found["union:0.15"]["f1"].value == pytest.approx(np.mean([rows[p]["union:0.15"]["f1"] for p in range(5)]))


def test_a_run_is_chosen_on_the_first_half_alone() -> None:
    rows = questions(8)
    for place in range(8):
        good, bad = (0.01, 0.5) if place < 4 else (0.5, 0.01)
        rows[place] |= {"blend:0.1": row(good, f1=0.5, recomputed=10), "epic:4": row(bad, f1=0.5, recomputed=5)}
    found = holdout(rows, 0.05)
    for rule in found["rules"]:
        assert rule["run"] == "blend:0.1"
        assert rule["selection"]["kl_answer"] == pytest.approx(0.01)
        assert rule["held_out"]["kl_answer"] == pytest.approx(0.5)
        assert rule["selection"]["count"] == rule["held_out"]["count"] == 4
        assert set(rule["held_out"]["intervals"]) <= set(rule["held_out"])
    assert [rule["rule"] for rule in found["rules"]] == ["nearest", "cheapest"]


def summary(run: str, share: float, kl: float, high: float) -> dict[str, Any]:
    return {"run": run, "recomputed_share": share, "kl_answer": kl, "intervals": {"kl_answer": (0.0, high)}}


def test_the_rules() -> None:
    of = (("a", 0.0, 0.2, 0.3), ("b", 0.05, 0.06, 0.11), ("c", 0.152, 0.05, 0.10), ("d", 0.3, 0.01, 0.02))
    runs = [summary(*one) for one in of]
    found = nearest(runs, 0.0)
    assert found["run"] == "c"  # 15 % in whole percents
    for max_kl, wanted in ((0.3, "a"), (0.11, "b"), (0.1, "c"), (0.09, "d"), (0.01, None)):
        chosen = cheapest(runs, max_kl)
        assert (None if chosen is None else chosen["run"]) == wanted


def test_runs_that_lack_questions_are_not_weighed() -> None:
    rows = questions(5)
    del rows[4]["reuse"]
    found = holdout(rows, 9.0)
    assert found["excluded"] == ["reuse"]
    assert {rule["run"] for rule in found["rules"]} == {"union:0.15"}
    assert [found["rules"][0][half]["count"] for half in ("selection", "held_out")] == [3, 2]


def test_where_nothing_can_be_chosen() -> None:
    assert holdout(questions(1), 1.0) is None
    found = holdout({place: {"full": row(recomputed=100)} for place in range(4)}, 1.0)
    assert [rule["run"] for rule in found["rules"]] == [None, None]
