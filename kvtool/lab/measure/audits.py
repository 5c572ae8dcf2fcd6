"""Divergence of answers from full prefill's, over all audits: by run and level, and over time."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtool.core.evaluate.audits import Audit, Kept
from kvtool.core.evaluate.measures import DISTANCES

_SPREAD = ("kl_first", "kl_answer")
_MOST_PERIODS = 31  # a finer grid than that says less
_PERIODS = ("hour", "day", "month")
_UTC = datetime.UTC

Group = tuple[str, str, str]  # run, levels, lead-in


def audit_overview(kept: Kept) -> dict[str, Any]:
    """Make the JSON of `inspect audit`: a row a run, level and lead-in in `runs`, each with its periods.

    Returns
    -------
    `questions`, `damaged` lines of the journal; `since`, `until`: the first audit and the last, in seconds since 1970,
    as all times; `period`: what a row of `periods` is over, by UTC; `runs`: see :func:`_row`, the most audited first.
    """
    audits = sorted(kept.audits, key=lambda audit: audit.at)
    period = _period_of(audits)
    groups: dict[Group, list[Audit]] = {}
    for audit in audits:
        groups.setdefault((audit.run, ", ".join(audit.levels), audit.lead_in), []).append(audit)
    in_order = sorted(groups.values(), key=lambda group: -len(group))
    return {
        "questions": len(audits),
        "damaged": kept.damaged,
        "since": audits[0].at if audits else None,
        "until": audits[-1].at if audits else None,
        "period": period,
        "runs": [_row(group, period) for group in in_order],
    }


def _row(group: Sequence[Audit], period: str) -> dict[str, Any]:
    """Sum up one run at one level: distances, agreement, what was recomputed, the worst question, and by period."""
    cached = [audit.tokens["reused"] + audit.tokens["recomputed"] for audit in group]
    shares = [audit.tokens["recomputed"] / of for audit, of in zip(group, cached, strict=True) if of]
    worst = max(group, key=lambda audit: audit.kl_answer)
    return {
        "run": group[0].run,
        "levels": list(group[0].levels),
        "lead_in": group[0].lead_in,
        **_distribution(group),
        "sampled": sum(audit.sampled for audit in group),
        "with_holes": sum(audit.holes > 0 for audit in group),
        "recomputed_share": statistics.fmean(shares) if shares else 0.0,
        "audit_ms_median": statistics.median(audit.milliseconds for audit in group),
        "worst": {name: getattr(worst, name) for name in ("question", "at", *DISTANCES)},
        "periods": _periods(group, period),
    }


def _distribution(group: Sequence[Audit]) -> dict[str, Any]:
    return {
        "count": len(group),
        **{name: statistics.fmean(getattr(audit, name) for audit in group) for name in DISTANCES},
        "spread": {name: quantiles([getattr(audit, name) for audit in group]) for name in _SPREAD},
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 90 % and 99 % of the values, and the largest: each is one of them, the least that has so many below."""
    points = np.percentile(values, [50, 90, 99, 100], method="inverted_cdf")
    return dict(zip(("median", "p90", "p99", "max"), map(float, points), strict=True))


# ---- over time ----


def _periods(group: Sequence[Audit], period: str) -> list[dict[str, Any]]:
    begin = _BEGINS[period]
    by_time: dict[datetime.datetime, list[Audit]] = {}
    for audit in group:
        by_time.setdefault(begin(_moment(audit.at)), []).append(audit)
    return [{"at": int(start.timestamp()), **_distribution(some)} for start, some in by_time.items()]


def _period_of(audits: Sequence[Audit]) -> str:
    """Name the finest period of which not too many lie between the first audit and the last."""
    moments = [_moment(audit.at) for audit in audits]
    few = (name for name in _PERIODS if len({_BEGINS[name](moment) for moment in moments}) <= _MOST_PERIODS)
    return next(few, _PERIODS[-1])


_BEGINS: dict[str, Callable[[datetime.datetime], datetime.datetime]] = {
    "hour": lambda moment: moment.replace(minute=0, second=0),
    "day": lambda moment: moment.replace(hour=0, minute=0, second=0),
    "month": lambda moment: moment.replace(day=1, hour=0, minute=0, second=0),
}


def _moment(seconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, _UTC)
