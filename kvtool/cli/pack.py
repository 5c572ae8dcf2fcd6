"""`kvtool store export|import`: a store, or a part of it, as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli.options import Run, takes
from kvtool.cli.out import counted
from kvtool.cli.parsing import list_of
from kvtool.cli.transfer import told
from kvtool.cli.upkeep import BUDGET, budget_of_run
from kvtool.cli.watch import Watch
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.codec.levels import check_level
from kvtool.core.errors import EXIT_DAMAGED

Pack = Annotated[Path, typer.Argument(metavar="FILE.kvpack", help="The pack.")]


@takes(StoreOptions)
def export(
    run: Run,
    pack: Pack,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATH|GLOB|ID", help="Only the files of these documents.", show_default="all"),
    ] = None,
    level: Annotated[
        list[str] | None, typer.Option("--level", metavar="LEVEL", help="Only KV of these levels.", show_default="all")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> int | None:
    """Write documents, chunks and their KV into one file."""
    from kvtool.core.pack.give import export as run_export

    levels = [check_level(one) for one in list_of(level)] or None
    with Watch(run) as watch:
        report = run_export(run.folder, pack, only=only or (), levels=levels, force=force, events=watch.events)
    for row in report.damaged:
        run.out.warning(f"left out: {row['what']}: {row['reason']}")

    def show() -> None:
        what = f"{counted(report.documents, 'document')} and {counted(report.chunks, 'chunk')} at a level"
        run.out.print(f"written: {report.path}: {what}, {report.bytes / 1e6:,.1f} MB, {report.seconds:.1f} s")

    run.out.result(report.to_json(), human=show)
    return EXIT_DAMAGED if report.damaged else None


@takes(StoreOptions, LockOptions)
def import_(
    run: Run,
    pack: Pack,
    max_size: Annotated[
        str | None, typer.Option("--max-size", metavar="20GB", help=BUDGET, show_default="the store's own")
    ] = None,
) -> int | None:
    """Take a pack into a store of the same model and settings.

    The store is made where there is none.
    """
    from kvtool.core.pack.take import take

    budget = budget_of_run(run, max_size)
    with Watch(run) as watch:
        report = take(run.folder, pack, lock_wait=run.lock_wait, max_size=budget, events=watch.events)
    report.direction = "import"
    return told(run, [report], report.to_json())
