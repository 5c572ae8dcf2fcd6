"""`kvtool fit`: learn from a store's own chunks."""

from __future__ import annotations

from kvtool.cli.commands import new_app
from kvtool.cli.job_view import JobView
from kvtool.cli.options import Run, takes
from kvtool.core.cache.options import StoreOptions
from kvtool.core.fit.fit_report import FitReport
from kvtool.core.fit.options import FitOptions

app = new_app("Learn the lead-in from the store's own chunks.")


@app.callback()
def _group() -> None:
    """A group, though it has one command."""


@app.command("lead-in")
@takes(FitOptions, StoreOptions, examples=("fit lead-in", "fit lead-in --from ../other-store"))
def lead_in(run: Run) -> None:
    """Train the rows of the warm passage for the model.

    Then `kvtool ingest … --lead-in learned` takes them.
    """
    from kvtool.core.fit.job import fit_lead_in

    with JobView(run) as view:
        report = fit_lead_in(run.folder, run.get(FitOptions), view.events)
    run.out.report(report.to_json(), human=lambda: _show(run, report))


def _show(run: Run, report: FitReport) -> None:
    held = report.held_out
    if held:
        run.out.print(
            f"error of held-out keys and values: {held['learned']:.4f} learned, {held['warm']:.4f} warm "
            f"(variances; {held['chunks']:.0f} chunks)"
        )
    run.out.print(
        f"lead-in {report.digest[:12]}: {report.tokens} rows, {report.bytes / 1e6:,.1f} MB, {report.seconds:.1f} s; "
        "use it with `kvtool ingest … --lead-in learned`"
    )
