"""Holdout choice of a run: chosen on the first half of the questions, reported on the other half.

The best of many runs on some questions is partly so by accident; its result on other questions has no such bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtool.core.evaluate.measures import MEASURES, Row
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.lab.measure.quality import summarise
from kvtool.lab.measure.trial import NO_CONTEXT

MOST_RECOMPUTED = 0.15  # of the cached tokens, in whole percents
_TOLD = (*MEASURES, "count", "recomputed_share", "f1_difference", "contains_difference")

Summary = dict[str, Any]
Rule = Callable[[Sequence[Summary], float], Summary | None]


def nearest(runs: Sequence[Summary], max_kl: float) -> Summary | None:
    """Choose the lowest mean KL of the answer among the runs that recompute at most 15 % of the cached tokens."""
    cheap = [run for run in runs if round(run["recomputed_share"], 2) <= MOST_RECOMPUTED]
    return min(cheap, key=lambda run: (run["kl_answer"], run["recomputed_share"]), default=None)


def cheapest(runs: Sequence[Summary], max_kl: float) -> Summary | None:
    """Choose the least recompute among the runs whose KL of the answer is below `max_kl` with its whole interval."""
    near = [run for run in runs if _is_near(run, max_kl)]
    return min(near, key=lambda run: (run["recomputed_share"], run["kl_answer"]), default=None)


RULES: Mapping[str, Rule] = {"nearest": nearest, "cheapest": cheapest}


def best(runs: Sequence[Summary], max_kl: float) -> dict[str, Any]:
    """Choose for all questions: the cheapest run that is near enough; where none is, the nearest of all.

    Returns
    -------
    `run` (None: there is none), `near`: whether its KL of the answer is at most `max_kl` with its whole interval.
    """
    weighed = [run for run in runs if run["run"] not in (REFERENCE, NO_CONTEXT)]
    chosen = cheapest(weighed, max_kl) or min(weighed, key=lambda run: run["kl_answer"], default=None)
    return {"run": chosen and chosen["run"], "near": chosen is not None and _is_near(chosen, max_kl)}


def _is_near(run: Summary, max_kl: float) -> bool:
    """Return True if the whole interval of the answer's KL is at most `max_kl`; a single question has no interval."""
    interval = run["intervals"]["kl_answer"]
    return interval is not None and interval[1] <= max_kl


def holdout(rows: Mapping[int, Mapping[str, Row]], max_kl: float) -> dict[str, Any] | None:
    """Choose by each rule on the first half of the questions, in the order of the file, and tell it of both halves.

    Returns
    -------
    `max_kl`, `max_recomputed`; `left_out`: runs that have not answered every question, which are not weighed; `rules`:
    `rule`, `run` (None: no run fulfils it), and the run's numbers on both halves, `chosen_on` and `held_out`. None:
    there are fewer than two questions.
    """
    places = sorted(rows)
    if len(places) < 2:
        return None
    names = {name for place in places for name in rows[place]} - {REFERENCE, NO_CONTEXT}
    whole = {name for name in names if all(name in rows[place] for place in places)}
    middle = math.ceil(len(places) / 2)
    first, second = (_summaries(rows, half, whole) for half in (places[:middle], places[middle:]))
    return {
        "max_kl": max_kl,
        "max_recomputed": MOST_RECOMPUTED,
        "left_out": sorted(names - whole),
        "rules": [_told(name, rule(list(first.values()), max_kl), second) for name, rule in RULES.items()],
    }


def _summaries(rows: Mapping[int, Mapping[str, Row]], places: Sequence[int], names: set[str]) -> dict[str, Summary]:
    """Sum up the runs of these names over these questions, by name."""
    some = {place: rows[place] for place in places}
    return {summary["run"]: summary for summary in summarise(some) if summary["run"] in names}


def _told(rule: str, chosen: Summary | None, second: Mapping[str, Summary]) -> dict[str, Any]:
    if chosen is None:
        return {"rule": rule, "run": None, "chosen_on": None, "held_out": None}
    run = chosen["run"]
    return {"rule": rule, "run": run, "chosen_on": _numbers(chosen), "held_out": _numbers(second[run])}


def _numbers(summary: Summary) -> dict[str, Any]:
    told = {name: summary[name] for name in _TOLD if name in summary}
    return told | {"intervals": {name: of for name, of in summary["intervals"].items() if name in told}}
