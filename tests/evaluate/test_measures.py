"""Means and medians over rows of which not all have every number."""

from __future__ import annotations

from kvtool.core.evaluate.measures import means, medians, numbers_of

ROWS = [{"f1": 1.0, "top1_agrees": True}, {"f1": 0.0, "ms": 4}, {"top1_agrees": False, "ms": 2, "answer": "x"}]


def test_a_row_counts_where_it_has_the_number() -> None:
    assert numbers_of(ROWS, "ms") == [4.0, 2.0]
    assert means(ROWS) == {"f1": 0.5, "top1_agrees": 0.5}
    assert means(ROWS, ("ms", "nothing")) == {"ms": 3.0}
    assert medians(ROWS, ("ms", "f1", "nothing")) == {"ms": 3.0, "f1": 0.5}
    assert means([]) == {}
