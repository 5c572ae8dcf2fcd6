"""Runs held against one another question by question: full prefill, no context, and each other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvtool.core.evaluate.measures import Row, means
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.lab.measure.intervals import Column, Estimate, Statistic, difference, estimates, mean, ratio, recovered
from kvtool.lab.measure.trial import NO_CONTEXT

Questions = Sequence[Mapping[str, Row]]  # a question is its rows by run
ColumnOf = Callable[[str, str], Column]  # of a run and a measure
_SCORES = ("f1", "contains")
_DISTANCES = ("kl_first", "kl_answer")


def compared(questions: Questions, names: Sequence[str], base: str = "") -> dict[str, dict[str, Estimate]]:
    """Estimate what is told of each run with an interval, all over the same draws.

    Parameters
    ----------
    base : the run that other runs' KL is held against; "" or one that is not there: none.

    Returns
    -------
    By run and name: the means `f1`, `contains`, `kl_first`, `kl_answer`; `f1_ratio` = Σ F1 / Σ F1 of full;
    `f1_difference`, `contains_difference` to full; `pgr_f1`, `pgr_contains` where there are answers without context;
    `kl_first_difference`, `kl_answer_difference` to `base`. What no question has is left out.
    """
    column = functools.cache(functools.partial(_column, questions))
    statistics = {(name, key): what for name in names for key, what in _statistics(column, names, name, base)}
    found: dict[str, dict[str, Estimate]] = {name: {} for name in names}
    for (name, key), estimate in estimates(statistics).items():
        found[name][key] = estimate
    return found


def _column(questions: Questions, name: str, key: str) -> Column:
    values = (question.get(name, {}).get(key) for question in questions)
    return [None if value is None else float(value) for value in values]


def _statistics(column: ColumnOf, names: Sequence[str], name: str, base: str) -> Iterator[tuple[str, Statistic]]:
    for key in (*_SCORES, *_DISTANCES):
        if _is_known(column(name, key)):
            yield key, mean(column(name, key))
    for key in _SCORES:
        if _is_known(column(name, key)):
            yield from _scores(column, name, key)
    if base in names and name not in (base, REFERENCE, NO_CONTEXT):
        for key in _DISTANCES:
            yield f"{key}_difference", difference(column(name, key), column(base, key))


def _scores(column: ColumnOf, name: str, key: str) -> Iterator[tuple[str, Statistic]]:
    own, full, none = (column(run, key) for run in (name, REFERENCE, NO_CONTEXT))
    if key == "f1":
        yield "f1_ratio", ratio(own, full)
    if name != REFERENCE:
        yield f"{key}_difference", difference(own, full)
    if name not in (REFERENCE, NO_CONTEXT) and _is_known(none):
        yield f"pgr_{key}", recovered(own, none, full)


def _is_known(column: Column) -> bool:
    return any(value is not None for value in column)


def by_full(questions: Questions, name: str) -> dict[str, dict[str, Any]]:
    """Average a run's scores over the questions that full prefill answers rightly, and over those it answers wrongly.

    What full prefill does not know no reuse can lose: only the first say whether reuse is safe (BoxOffice, arXiv
    2609.31415). Rightly: its answer contains a gold one. Nothing where there are no gold answers.
    """
    scored = [question for question in questions if "contains" in question[name] and "contains" in question[REFERENCE]]
    if not scored:
        return {}
    right = [question[name] for question in scored if question[REFERENCE]["contains"]]
    wrong = [question[name] for question in scored if not question[REFERENCE]["contains"]]
    return {
        "full_right": {"count": len(right), **means(right, _SCORES)},
        "full_wrong": {"count": len(wrong), **means(wrong, _SCORES)},
    }
