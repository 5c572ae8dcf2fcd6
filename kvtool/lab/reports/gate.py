"""`kvtool inspect gate`: the laws that the gate has checked on the store's model."""

from __future__ import annotations

from kvtool.core.errors import EXIT_MISFIT, KvtoolError
from kvtool.lab.charts.page import Table
from kvtool.lab.reports.report import Desk, Findings, Report


def gate(desk: Desk) -> Findings:
    """Show how near the model is to each law, as it was measured at its first meeting with the store."""
    from kvtool.core.session.gate import stored_verdict

    verdict = stored_verdict(desk.store, desk.identity.fingerprint)
    if verdict is None:
        raise KvtoolError("the gate has not met this model yet", "it runs at the first ingest or query")
    rows = [
        (f"law {c.law}", c.name, f"{c.difference:.3g}", f"{c.allowed:.3g}", "passed" if c.passed else "FAILED")
        for c in verdict.checks
    ]
    table = Table(("law", "check", "difference", "allowed", ""), tuple(rows))
    return Findings("Gate", verdict.to_json(), [table], exit_code=0 if verdict.passed else EXIT_MISFIT)


REPORT = Report(gate, examples=("inspect gate", "inspect gate --json"))
