"""`kvtool inspect audit`: distance of audited answers from full prefill's, by run, level and lead-in."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvtool.core.common.sizes import counted
from kvtool.core.errors import KvtoolError
from kvtool.core.evaluate.audits import Audit, kept_audits
from kvtool.core.evaluate.measures import DISTANCES, means
from kvtool.reports.page import Shown, Table
from kvtool.reports.report import Report, ReportContext, ReportResult

_SPREAD = ("median", "p90", "p99", "max")
_HEAD = (
    *("run", "level", "lead-in", "audits", "recomputed"),
    *("KL answer: median", "answer: 90 %", "answer: 99 %", "answer: worst"),
    *("KL first: median", "first: 90 %", "first: 99 %", "first: worst"),  # a narrow terminal parts them
    *("same first token", "same answer", "worst question"),
)


def audit(context: ReportContext) -> ReportResult:
    """Show how far the answers that `query --audit` has compared with full prefill were from it, by mode and level."""
    identity = context.identity
    audits = kept_audits(context.store, identity.fingerprint)
    if not audits:
        raise KvtoolError(
            f"no answer of {identity.model} from this store has been audited",
            '`kvtool query "…" --audit 1` audits one, KVTOOL_AUDIT=0.01 one of a hundred questions',
        )
    value = {"resolved": {"model": identity.model, "fingerprint": identity.fingerprint}} | audit_overview(audits)
    return ReportResult("Audit", value, [*_summary(value)])


def audit_overview(audits: Sequence[Audit]) -> dict[str, Any]:
    groups: dict[tuple[str, str, str], list[Audit]] = {}
    for audit in audits:
        groups.setdefault((audit.run, ", ".join(audit.levels), audit.lead_in), []).append(audit)
    return {
        "questions": len(audits),
        "since": min(audit.at for audit in audits),
        "until": max(audit.at for audit in audits),
        "runs": [_row(group) for group in sorted(groups.values(), key=lambda group: -len(group))],
    }


def _row(group: Sequence[Audit]) -> dict[str, Any]:
    cached = [audit.tokens["reused"] + audit.tokens["recomputed"] for audit in group]
    shares = [audit.tokens["recomputed"] / of for audit, of in zip(group, cached, strict=True) if of]
    worst = max(group, key=lambda audit: audit.kl_answer)
    return {
        "run": group[0].run,
        "levels": list(group[0].levels),
        "lead_in": group[0].lead_in,
        "count": len(group),
        **means([asdict(audit) for audit in group], DISTANCES),
        "spread": {name: quantiles([getattr(audit, name) for audit in group]) for name in ("kl_first", "kl_answer")},
        "sampled": sum(audit.sampled for audit in group),
        "incomplete": sum(audit.holes > 0 for audit in group),
        "recomputed_share": statistics.fmean(shares) if shares else 0.0,
        "worst": {"question": worst.question, "time": worst.at} | {name: getattr(worst, name) for name in DISTANCES},
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    import numpy as np

    points = np.percentile(values, [50, 90, 99, 100], method="inverted_cdf")
    return dict(zip(_SPREAD, map(float, points), strict=True))


def _summary(value: Mapping[str, Any]) -> Iterator[Shown]:
    yield Table(_HEAD, tuple(_cells(run) for run in value["runs"]))
    yield _when(value)
    sampled, holes = (sum(run[name] for run in value["runs"]) for name in ("sampled", "incomplete"))
    if sampled:
        yield f"sampled answers: {sampled}; `same answer` compares their greedy answers"
    if holes:
        yield f"prompts with chunks that were computed in place: {holes}; what they say of reuse is too good"


def _cells(run: Mapping[str, Any]) -> tuple[object, ...]:
    spreads = [f"{run['spread'][name][at]:.4f}" for name in ("kl_answer", "kl_first") for at in _SPREAD]
    return (
        *(run["run"], ", ".join(run["levels"]) or "-", run["lead_in"], run["count"], f"{run['recomputed_share']:.1%}"),
        *(*spreads, f"{run['top1_agrees']:.1%}", f"{run['answer_equal']:.1%}", run["worst"]["question"]),
    )


def _when(value: Mapping[str, Any]) -> str:
    since, until = (time.strftime("%Y-%m-%d %H:%M", time.gmtime(value[at])) for at in ("since", "until"))
    return f"{counted(value['questions'], 'audit')}, {since if since == until else f'{since} to {until}'} UTC"


REPORT = Report(audit, examples=("inspect audit", "inspect audit --html audit.html"))
