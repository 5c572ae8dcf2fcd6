"""`kvtool inspect gate`: the laws that the gate has checked on the store's model."""

from __future__ import annotations

from kvtool.core.errors import EXIT_MISFIT, KvtoolError
from kvtool.lab.charts.page import Table
from kvtool.lab.reports.report import Desk, Findings, Report


def gate(desk: Desk) -> Findings:
    """Show the results of the model's self-check: the difference from each law, and the limit."""
    from kvtool.core.session.identity import known_result

    verdict = known_result(desk.store, desk.identity.fingerprint)
    if verdict is None:
        raise KvtoolError("the gate has not met this model yet", "it runs at the first ingest or query")
    rows = [
        (f"law {c.law}", c.name, c.arithmetic, f"{c.difference:.3g}", f"{c.allowed:.3g}", _said(c.passed))
        for c in verdict.checks
    ]
    tables = [Table(("law", "check", "computed", "difference", "allowed", ""), tuple(rows))]
    if others := verdict.cross_dtype_loss.items():
        tables.append(Table(("made in", "nats a token lost"), tuple((made, f"{loss:.3g}") for made, loss in others)))
    return Findings("Gate", verdict.to_json(), tables, exit_code=0 if verdict.passed else EXIT_MISFIT)


def _said(passed: bool) -> str:
    return "passed" if passed else "FAILED"


REPORT = Report(gate, examples=("inspect gate", "inspect gate --json"))
