"""`kvtool inspect gate`: the laws that the gate has checked on the store's model."""

from __future__ import annotations

from kvtool.core.errors import EXIT_MISFIT, KvtoolError
from kvtool.lab.charts.page import Table
from kvtool.lab.reports.report import Desk, Findings, Report


def gate(desk: Desk) -> Findings:
    """Show how near the model is to each law, as it was measured at its first meeting with the store."""
    from kvtool.core.session.gate import apart_name, known_verdict

    identity = desk.identity
    verdict = known_verdict(desk.store, identity.fingerprint)
    if verdict is None:
        raise KvtoolError("the gate has not met this model yet", "it runs at the first ingest or query")
    apart = known_verdict(desk.store, apart_name(identity)) if identity.keeps_alone else None
    rows = [
        (f"law {c.law}", c.name, c.arithmetic, f"{c.difference:.3g}", f"{c.allowed:.3g}", _said(c.passed))
        for c in (*verdict.checks, *(apart.checks if apart else ()))
    ]
    tables = [Table(("law", "check", "computed", "difference", "allowed", ""), tuple(rows))]
    if others := [*verdict.of_others.items(), *(apart.of_others if apart else {}).items()]:
        tables.append(Table(("made in", "nats a token lost"), tuple((made, f"{loss:.3g}") for made, loss in others)))
    value = verdict.to_json()
    if apart is not None:
        value["apart"] = apart.to_json()
        lost = tuple((mode, f"{loss:.3g}") for mode, loss in apart.losses.items())
        tables.append(Table(("of chunks apart", "nats a token lost"), lost))
    passed = verdict.passed and (apart is None or apart.passed)
    return Findings("Gate", value, tables, exit_code=0 if passed else EXIT_MISFIT)


def _said(passed: bool) -> str:
    return "passed" if passed else "FAILED"


REPORT = Report(gate, examples=("inspect gate", "inspect gate --json"))
