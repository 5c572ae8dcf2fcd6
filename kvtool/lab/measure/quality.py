"""Every run over a question file, beside full recompute: answers, distances, times, and how sure they are."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.core.codec.levels import known
from kvtool.core.common.sizes import counted
from kvtool.core.evaluate.measures import MEASURES, Row, means, numbers_of
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.core.query.prompt import lay_out
from kvtool.lab.measure.evaluation import RowsOf, by_run, name_of
from kvtool.lab.measure.found import found, retrieval_of
from kvtool.lab.measure.intervals import CONFIDENCE, RESAMPLES, Estimate
from kvtool.lab.measure.pairs import by_full, compared
from kvtool.lab.measure.runs import RunSpec, ordered
from kvtool.lab.measure.trial import NO_CONTEXT, Trial

if TYPE_CHECKING:
    from kvtool.core.common.types import Warn
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.reply import Request
    from kvtool.core.session.session import Session


def quality_rows(session: Session, specs: Mapping[str, RunSpec], options: QueryOptions, warn: Warn) -> RowsOf:
    """Make what answers a question: in full, then by each run.

    The store stays as it is: holes are computed in place, for every run anew, and a warning names them.
    """
    decoder, source = session.decoder, session.source

    def rows_of(request: Request, names: Sequence[str]) -> Mapping[str, Row]:
        trial = Trial(decoder, source, lay_out(session, request, options), options)
        rows = dict(trial.rows([specs[name] for name in names]))
        rows[REFERENCE] = {**rows[REFERENCE], **found(session.finder.places, trial.asked)}
        holes = max((row["holes"] for row in rows.values()), key=len)
        if holes:
            warn(
                f"{name_of(request)}: {counted(len(holes), 'chunk')} computed in place: {holes[0]}",
                "see `kvtool store verify`; its results say little about reuse",
            )
        return rows

    return rows_of


def summarise(rows: Mapping[int, Mapping[str, Row]], base: str = "") -> list[dict[str, Any]]:
    """Sum up each run: the reference first, then by mode and amount.

    Parameters
    ----------
    base : the run that other runs' KL is held against.

    Returns
    -------
    `run`, `count`; means (`f1`, `exact_match`, `contains` over questions with answers), `recomputed_share` of the
    cached rows, medians `ttft_ms_median` and `speedup`, what :func:`compared` and :func:`by_full` tell, `intervals`
    (95 %) of the former, `pareto`: no other run recomputes less and is nearer to full.
    """
    questions, of_run = [of_question for _, of_question in sorted(rows.items())], by_run(rows)
    names = ordered(of_run)
    estimated = compared(questions, names, base)
    summaries = [_summary(name, of_run[name], estimated[name]) for name in names]
    weighed = [summary for summary in summaries if summary["run"] != NO_CONTEXT]
    for summary in summaries:
        dominated = any(_dominates(other, summary) for other in weighed)
        summary["pareto"] = summary in weighed and not dominated
    return summaries


def levels_in(rows: Mapping[int, Mapping[str, Row]]) -> list[str]:
    """List the levels at which any run read chunks, finest first: what a lossy one rounds away is in its results."""
    return known(
        level for of_question in rows.values() for row in of_question.values() for level in row.get("levels", ())
    )


def overview(rows: Mapping[int, Mapping[str, Row]], base: str = "") -> dict[str, Any]:
    """Make the JSON of `inspect quality`; `base` is the run that other runs' KL is held against."""
    return {
        "questions": len(rows),
        "with_holes": sum(any(row["holes"] for row in of_question.values()) for of_question in rows.values()),
        "reference": REFERENCE,
        "kl_base": base if any(base in of_question for of_question in rows.values()) else None,
        "interval_confidence": CONFIDENCE,
        "resamples": RESAMPLES,
        "levels": levels_in(rows),
        "retrieval": retrieval_of(rows),
        "runs": summarise(rows, base),
    }


def _summary(name: str, questions: Sequence[Mapping[str, Row]], estimated: Mapping[str, Estimate]) -> dict[str, Any]:
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
    """Return True if `a` is at least as good in both, and better in one."""
    costs, others = ((summary["recomputed_share"], summary["kl_answer"]) for summary in (a, b))
    return costs != others and costs[0] <= others[0] and costs[1] <= others[1]
