"""`kvtool store export|import|merge`: a store, or a part of it, as one file; several stores as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli.job_view import JobView
from kvtool.cli.options import Run, takes
from kvtool.cli.text import one_line
from kvtool.cli.transfer import told
from kvtool.cli.upkeep import tell_budget
from kvtool.core.cache.options import StoreOptions
from kvtool.core.common.sizes import counted
from kvtool.core.errors import EXIT_DAMAGED
from kvtool.core.pack.options import ExportOptions, ImportOptions

Sources = Annotated[list[Path], typer.Argument(metavar="STORE|FILE.kvpack...", help="Stores' folders, or packs.")]
Pack = Annotated[Path, typer.Argument(metavar="FILE.kvpack", help="The pack.")]


@takes(
    ExportOptions,
    StoreOptions,
    examples=(
        "store export all.kvpack",
        "store export all.kvpack --sign key",
        'store export part.kvpack --only "notes/*.md" --level 2',
    ),
)
def export(run: Run, pack: Pack) -> int | None:
    """Write documents, chunks and their KV into one file."""
    from kvtool.core.pack.give import export as run_export

    options = run.get(ExportOptions)
    levels = options.levels or None
    with JobView(run) as view:
        report = run_export(
            run.folder,
            pack,
            only=options.only,
            levels=levels,
            force=options.force,
            key=options.key,
            events=view.events,
        )
    for row in report.damaged:
        run.out.warning(f"left out: {row['what']}: {row['reason']}")

    def show() -> None:
        what = f"{counted(report.documents, 'document')} and {counted(report.chunks, 'chunk')} at a level"
        text = f"written: {report.path}: {what}, {report.bytes / 1e6:,.1f} MB, {report.seconds:.1f} s"
        run.out.print(one_line(text))

    run.out.report(report.to_json(), human=show)
    return EXIT_DAMAGED if report.damaged else None


@takes(
    ImportOptions,
    StoreOptions,
    examples=("store import all.kvpack --store ./kv", "store import all.kvpack --trust key.pub"),
)
def import_(run: Run, pack: Pack) -> int | None:
    """Take a pack into a store of the same model and settings.

    The store is made where there is none.
    """
    from kvtool.core.pack.take import take

    options, trust = run.get(ImportOptions), run.get(ImportOptions).trusted(run.get(StoreOptions))
    tell_budget(run, options.max_size)
    with JobView(run) as view:
        report = take(
            run.folder,
            pack,
            trust=trust,
            lock_wait=options.lock_wait,
            max_size=options.max_size,
            events=view.events,
        )
    report.direction = "import"
    return told(run, [report], report.to_json())


@takes(
    ImportOptions,
    StoreOptions,
    examples=("store merge ./kv-1 ./kv-2 --mine --store ./kv", "store merge night.kvpack ./kv-2"),
)
def merge(run: Run, sources: Sources) -> int | None:
    """Take other stores of the same model and settings into this one.

    Such are the parts of `ingest --shard`: say --mine of your own. The store is made where there is none; the others
    stay as they are.
    """
    from kvtool.core.cache.store import Store
    from kvtool.core.pack.merge import merge as run_merge
    from kvtool.core.session.identity import store_identity
    from kvtool.lab.reports.glance import computed_by, makers

    options, trust = run.get(ImportOptions), run.get(ImportOptions).trusted(run.get(StoreOptions))
    tell_budget(run, options.max_size)
    with JobView(run) as view:
        reports = run_merge(
            run.folder,
            sources,
            trust=trust,
            lock_wait=options.lock_wait,
            max_size=options.max_size,
            events=view.events,
        )
    with Store.open(run.folder) as store:
        made = computed_by(store, store_identity(store))
    if len(several := makers(made)) > 1:
        run.out.status(f"computed {', '.join(several)}: the first question measures what that loses")
    return told(run, reports, {"merged": [report.to_json() for report in reports], "computed_by": made})
