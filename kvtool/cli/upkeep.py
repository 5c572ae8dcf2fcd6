"""`kvtool store forget|…`: what goes from a store, and what stays."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtool.cli.options import Run, takes
from kvtool.cli.parsing import store_path

Targets = Annotated[
    list[str], typer.Argument(metavar="PATH|GLOB|ID...", help="Documents: a path, a folder, a glob, a chunk's id.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and do nothing.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it even where more than half would go.")]


@takes()
def forget(run: Run, targets: Targets, dry_run: DryRun = False, yes: Yes = False) -> None:
    """Forget documents, and the chunks that nobody else refers to."""
    from kvtool.core.upkeep.forget import forget as run_forget

    settings = run.settings
    plan = run_forget(store_path(settings.store), targets, dry_run=dry_run, yes=yes, lock_wait=settings.lock_wait)
    chunks = sum(step.chunks for step in plan.steps)
    value = {"dry_run": dry_run, "documents": list(plan.sources), "chunks": chunks, "bytes": plan.size}

    def show() -> None:
        if run.out.verbosity < 0:  # a report, not data
            return
        for source in plan.sources:
            run.out.print(source)
        what = "would be forgotten" if dry_run else "forgotten"
        run.out.print(f"{what}: {len(plan.sources)} documents, {chunks} chunks, {plan.size / 1e6:,.1f} MB")

    run.out.result(value, human=show)
