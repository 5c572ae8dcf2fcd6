"""`kvtool inspect gate`: the laws that the gate has checked on the store's model."""

from __future__ import annotations

from kvtool.core.errors import EXIT_MISFIT, KvtoolError
from kvtool.reports.page import Table
from kvtool.reports.report import Report, ReportContext, ReportResult


def gate(context: ReportContext) -> ReportResult:
    """Show how near the model is to each law, as measured when it first met the store."""
    from kvtool.core.session.identity import known_result

    verdict = known_result(context.store, context.identity.fingerprint)
    if verdict is None:
        raise KvtoolError("this model has not been checked with this store", "the first ingest or query checks it")
    rows = [
        (
            f"law {c.law}",
            c.name,
            c.arithmetic,
            f"{c.difference:.3g}",
            f"{c.tolerance:.3g}",
            "passed" if c.passed else "FAILED",
        )
        for c in verdict.checks
    ]
    tables = [Table(("law", "check", "computed", "difference", "tolerance", ""), tuple(rows))]
    if others := verdict.cross_dtype_loss.items():
        tables.append(Table(("made in", "nats a token lost"), tuple((made, f"{loss:.3g}") for made, loss in others)))
    return ReportResult("Gate", verdict.to_json(), tables, exit_code=0 if verdict.passed else EXIT_MISFIT)


REPORT = Report(gate, examples=("inspect gate", "inspect gate --json"))
