"""`kvtool inspect audit`: how far audited answers were from full prefill's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvtool.core.errors import KvtoolError
from kvtool.lab.charts.page import Table
from kvtool.lab.reports.report import Desk, Findings, Report


def audit(desk: Desk) -> Findings:
    """Show how far audited answers (`query --audit`) were from full prefill, by mode and level."""
    from kvtool.core.evaluate.audits import kept_audits
    from kvtool.lab.charts.audit import audit_sections
    from kvtool.lab.measure.audits import audit_overview

    identity = desk.identity
    kept = kept_audits(desk.store, identity.fingerprint)
    if not kept.audits:
        raise KvtoolError(
            f"no answer of {identity.model} from this store has been audited",
            '`kvtool query "…" --audit 1` audits one, KVTOOL_AUDIT=0.01 one of a hundred questions',
        )
    value = {"resolved": {"model": identity.model, "fingerprint": identity.fingerprint}} | audit_overview(kept)
    return Findings("Audit", value, [*_told(value)], audit_sections(value))


def _told(value: Mapping[str, Any]) -> Iterator[str | Table]:
    from kvtool.lab.charts.audit import audit_table, period_table, told_when, worst_table

    yield audit_table(value)
    yield told_when(value)
    yield worst_table(value)
    if any(len(run["periods"]) > 1 for run in value["runs"]):
        yield period_table(value)
    sampled, holes = (sum(run[name] for run in value["runs"]) for name in ("sampled", "with_holes"))
    if sampled:
        yield f"sampled answers: {sampled}; whether the whole answer is the same is told of the greedy one"
    if holes:
        yield f"prompts with chunks that were computed in place: {holes}; what they say of reuse is too good"
    if value["damaged"]:
        yield f"lines of the journal that cannot be read: {value['damaged']}; they are left out"


REPORT = Report(audit, examples=("inspect audit", "inspect audit --html audit.html"))
