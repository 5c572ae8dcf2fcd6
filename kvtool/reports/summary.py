"""Summary of an evaluation: runs next to full recompute and to one another, retrieval recall, choice of a run."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvtool.core.codec.levels import known
from kvtool.core.errors import UsageError
from kvtool.core.evaluate.measures import MEASURES, Row, means, numbers_of
from kvtool.core.fusion.selectors import REFERENCE, SELECTORS
from kvtool.reports.evaluation import by_run
from kvtool.reports.intervals import (
    CONFIDENCE,
    RESAMPLES,
    Column,
    Estimate,
    Statistic,
    difference,
    estimates,
    mean,
    ratio,
    recovered,
)
from kvtool.reports.report import NO_CONTEXT

if TYPE_CHECKING:
    from kvtool.core.query.prompt import PromptLayout
    from kvtool.core.query.reply import Request
    from kvtool.core.retrieval.finder import Places

MOST_RECOMPUTED = 0.15  # of the cached tokens, in whole percents
_SCORES = ("f1", "contains")
_DISTANCES = ("kl_first", "kl_answer")

Rows = Mapping[int, Mapping[str, Row]]  # of each question by its place in the file, and of each run by its name
Questions = Sequence[Mapping[str, Row]]
Summary = dict[str, Any]
ColumnOf = Callable[[str, str], Column]  # of a run and a measure
Rule = Callable[[Sequence[Summary], float], Summary | None]


def summarise(rows: Rows, base: str = "") -> list[dict[str, Any]]:
    questions, of_run = [of_question for _, of_question in sorted(rows.items())], by_run(rows)
    names = ordered(of_run)
    estimated = compared(questions, names, base)
    summaries = [_summary(name, of_run[name], estimated[name]) for name in names]
    weighed = [summary for summary in summaries if summary["run"] != NO_CONTEXT]
    for summary in summaries:
        dominated = any(_dominates(other, summary) for other in weighed)
        summary["pareto"] = summary in weighed and not dominated
    return summaries


def overview(rows: Rows, base: str = "") -> dict[str, Any]:
    levels = (level for of_question in rows.values() for row in of_question.values() for level in row["levels"])
    return {
        "questions": len(rows),
        "incomplete": sum(any(row["holes"] for row in of_question.values()) for of_question in rows.values()),
        "reference": REFERENCE,
        "kl_base": base if any(base in of_question for of_question in rows.values()) else None,
        "interval_confidence": CONFIDENCE,
        "resamples": RESAMPLES,
        "levels": known(levels),
        "retrieval": retrieval_summary(rows),
        "runs": summarise(rows, base),
    }


def _summary(name: str, questions: Questions, estimated: Mapping[str, Estimate]) -> dict[str, Any]:
    rows = [question[name] for question in questions]
    shares = [row["recomputed"] / cached for row in rows if (cached := row["reused"] + row["recomputed"])]
    return {
        "run": name,
        "count": len(rows),
        **means(rows, (*MEASURES, "bytes_read")),
        **{f"tokens_{count}": mean for count, mean in means(rows, ("recomputed", "fresh")).items()},
        "recomputed_share": statistics.fmean(shares) if shares else 0.0,
        "ttft_ms_median": statistics.median(numbers_of(rows, "ttft_ms")),
        "speedup": statistics.median(numbers_of(rows, "speedup")),
        **{key: estimate.value for key, estimate in estimated.items()},
        **by_full(questions, name),
        "intervals": {key: estimate.interval for key, estimate in estimated.items()},
    }


def _dominates(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    costs, others = ((summary["recomputed_share"], summary["kl_answer"]) for summary in (a, b))
    return costs != others and costs[0] <= others[0] and costs[1] <= others[1]


def ordered(names: Iterable[str]) -> list[str]:
    modes = list(SELECTORS)

    def place(name: str) -> tuple[int, str, float]:
        variant, _, amount = name.partition(":")
        mode = variant.partition("+")[0]
        return modes.index(mode) if mode in modes else len(modes), variant, float(amount or 0)

    return sorted(names, key=place)


# ---- question by question ----


def compared(questions: Questions, names: Sequence[str], base: str = "") -> dict[str, dict[str, Estimate]]:
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


# ---- retrieval ----


def check_sources(places: Places, requests: Sequence[Request]) -> None:
    for name in dict.fromkeys(name for request in requests for name in request.sources):
        places.of_document(name)


def retrieval_recall(places: Places, asked: PromptLayout) -> dict[str, float]:
    """Measure retrieval of a question's expected sources; empty if it names none, or names its own chunks."""
    request = asked.request
    if not request.sources or request.documents or request.chunks:
        return {}
    best_first = [hit.passage.chunk_id for hit in sorted(asked.hits, key=lambda hit: -hit.score)]
    wanted = [_chunks_of(places, name) for name in request.sources]
    ranks = [at for at, chunk in enumerate(best_first, 1) if any(chunk in chunks for chunks in wanted)]
    there = [not chunks.isdisjoint(best_first) for chunks in wanted]
    return {"recall": statistics.fmean(there), "reciprocal_rank": 1 / ranks[0] if ranks else 0.0}


def _chunks_of(places: Places, name: str) -> set[bytes]:
    with suppress(UsageError):
        return {passage.chunk_id for passage in places.of_document(name)}
    return set()


def retrieval_summary(rows: Rows) -> dict[str, Any] | None:
    """Sum up :func:`retrieval_recall` over the questions that name sources; None if none does."""
    known = [question[REFERENCE] for _, question in sorted(rows.items()) if "recall" in question.get(REFERENCE, {})]
    if not known:
        return None
    columns = {name: numbers_of(known, name) for name in ("recall", "reciprocal_rank")}
    estimated = estimates({name: mean(column) for name, column in columns.items()})
    return {
        "count": len(known),
        **{name: estimate.value for name, estimate in estimated.items()},
        "complete": statistics.fmean(recall == 1 for recall in columns["recall"]),
        "intervals": {name: estimate.interval for name, estimate in estimated.items()},
    }


# ---- choice of a run ----


def nearest(runs: Sequence[Summary], max_kl: float) -> Summary | None:
    cheap = [run for run in runs if round(run["recomputed_share"], 2) <= MOST_RECOMPUTED]
    return min(cheap, key=lambda run: (run["kl_answer"], run["recomputed_share"]), default=None)


def cheapest(runs: Sequence[Summary], max_kl: float) -> Summary | None:
    near = [run for run in runs if _is_near(run, max_kl)]
    return min(near, key=lambda run: (run["recomputed_share"], run["kl_answer"]), default=None)


RULES: Mapping[str, Rule] = {"nearest": nearest, "cheapest": cheapest}


def best(runs: Sequence[Summary], max_kl: float) -> dict[str, Any]:
    """Choose the cheapest run that is near enough; if none is, the nearest of all. No runs: None."""
    weighed = [run for run in runs if run["run"] not in (REFERENCE, NO_CONTEXT)]
    chosen = cheapest(weighed, max_kl) or min(weighed, key=lambda run: run["kl_answer"], default=None)
    return {"run": chosen and chosen["run"], "within_limit": chosen is not None and _is_near(chosen, max_kl)}


def _is_near(run: Summary, max_kl: float) -> bool:
    """A single question has no interval."""
    interval = run["intervals"]["kl_answer"]
    return interval is not None and interval[1] <= max_kl


def holdout(rows: Rows, max_kl: float) -> dict[str, Any] | None:
    """Choose a run by each rule on the first half of the questions, in the file's order, and report it on both halves.

    The best of many runs on some questions is partly so by accident; its result on other questions has no such bias.
    Runs that have not answered every question are not weighed. None: there are fewer than two questions.
    """
    places = sorted(rows)
    if len(places) < 2:
        return None
    names = {name for place in places for name in rows[place]} - {REFERENCE, NO_CONTEXT}
    whole = {name for name in names if all(name in rows[place] for place in places)}
    middle = math.ceil(len(places) / 2)
    first, second = (_summaries(rows, half, whole) for half in (places[:middle], places[middle:]))
    chosen = {name: rule(list(first.values()), max_kl) for name, rule in RULES.items()}
    return {
        "max_kl": max_kl,
        "max_recomputed": MOST_RECOMPUTED,
        "excluded": sorted(names - whole),
        "rules": [
            {"rule": name, "run": run and run["run"], "selection": run, "held_out": run and second[run["run"]]}
            for name, run in chosen.items()
        ],
    }


def _summaries(rows: Rows, places: Sequence[int], names: set[str]) -> dict[str, Summary]:
    some = {place: rows[place] for place in places}
    return {summary["run"]: summary for summary in summarise(some) if summary["run"] in names}
