"""Every run over a question file, beside full recompute: answers, distances, times, and how sure they are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.core.codec.levels import known
from kvtool.core.evaluate.measures import MEASURES, Row, means, numbers_of
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.core.query.layout import lay_out
from kvtool.lab.measure.evaluation import RowsOf, by_run, name_of
from kvtool.lab.measure.intervals import CONFIDENCE, RESAMPLES, interval, ratio_interval
from kvtool.lab.measure.runs import RunSpec, ordered
from kvtool.lab.measure.trial import Trial

if TYPE_CHECKING:
    from kvtool.core.common.types import Warn
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.reply import Request
    from kvtool.core.session.session import Session

_WITH_INTERVAL = ("f1", "contains", "kl_first", "kl_answer")


def quality_rows(session: Session, specs: Mapping[str, RunSpec], options: QueryOptions, warn: Warn) -> RowsOf:
    """Make what answers a question: in full, then by each run.

    The store stays as it is: holes are computed in place, for every run anew, and a warning names them.
    """
    decoder, source = session.decoder, session.source

    def rows_of(request: Request, names: Sequence[str]) -> Mapping[str, Row]:
        trial = Trial(decoder, source, lay_out(session, request, options), options)
        rows = dict(trial.rows([specs[name] for name in names]))
        holes = max((row["holes"] for row in rows.values()), key=len)
        if holes:
            warn(
                f"{name_of(request)}: {len(holes)} chunk(s) were computed in place: {holes[0]}",
                "see `kvtool store verify`; its results say little about reuse",
            )
        return rows

    return rows_of


def summarise(rows: Mapping[int, Mapping[str, Row]]) -> list[dict[str, Any]]:
    """Sum up each run: the reference first, then by mode and amount.

    Returns
    -------
    `run`, `count`; means (`f1`, `exact_match`, `contains` over questions with answers), `recomputed_share` of the
    cached rows, medians `ttft_ms_median` and `speedup`, `f1_ratio` = Σ F1 / Σ F1 of full on the same questions,
    `intervals` (95 %), `pareto`: no other run recomputes less and is nearer to full.
    """
    questions = by_run(rows)
    summaries = [_summary(name, questions[name]) for name in ordered(questions)]
    for summary in summaries:
        summary["pareto"] = not any(_dominates(other, summary) for other in summaries)
    return summaries


def levels_in(rows: Mapping[int, Mapping[str, Row]]) -> list[str]:
    """List the levels at which any run read chunks, finest first: what a lossy one rounds away is in its results."""
    return known(
        level for of_question in rows.values() for row in of_question.values() for level in row.get("levels", ())
    )


def overview(rows: Mapping[int, Mapping[str, Row]]) -> dict[str, Any]:
    """Make the JSON of `inspect quality`."""
    return {
        "questions": len(rows),
        "with_holes": sum(any(row["holes"] for row in of_question.values()) for of_question in rows.values()),
        "reference": REFERENCE,
        "interval_confidence": CONFIDENCE,
        "resamples": RESAMPLES,
        "levels": levels_in(rows),
        "runs": summarise(rows),
    }


def _summary(name: str, questions: Sequence[Mapping[str, Row]]) -> dict[str, Any]:
    rows = [question[name] for question in questions]
    shares = [row["recomputed"] / cached for row in rows if (cached := row["reused"] + row["recomputed"])]
    summary: dict[str, Any] = {
        "run": name,
        "count": len(rows),
        **means(rows, (*MEASURES, "bytes_read")),
        **{f"tokens_{count}": mean for count, mean in means(rows, ("recomputed", "fresh")).items()},
        "recomputed_share": statistics.fmean(shares) if shares else 0.0,
        "ttft_ms_median": statistics.median(numbers_of(rows, "ttft_ms")),
        "speedup": statistics.median(numbers_of(rows, "speedup")),
    }
    intervals = {key: interval(numbers) for key in _WITH_INTERVAL if (numbers := numbers_of(rows, key))}
    if scores := numbers_of(rows, "f1"):
        full = numbers_of([question[REFERENCE] for question in questions], "f1")
        summary["f1_ratio"] = sum(scores) / sum(full) if sum(full) else None
        intervals["f1_ratio"] = ratio_interval(scores, full)
    return summary | {"intervals": intervals}


def _dominates(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether `a` is at least as good in both, and better in one."""
    costs, others = ((summary["recomputed_share"], summary["kl_answer"]) for summary in (a, b))
    return costs != others and costs[0] <= others[0] and costs[1] <= others[1]
