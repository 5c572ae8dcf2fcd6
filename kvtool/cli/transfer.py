"""`kvtool store push|pull|export|import`: send a store to others and take from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli.options import ManyValues, Run, takes, tell_budget
from kvtool.cli.terminal import one_line
from kvtool.core.cache.options import StoreOptions
from kvtool.core.common.text import counted
from kvtool.core.errors import EXIT_DAMAGED
from kvtool.core.remote.options import ExportOptions, ImportOptions, PullOptions, PushOptions

if TYPE_CHECKING:
    from kvtool.core.remote.options import TransferReport

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="redis://HOST:PORT/DB[?prefix=NAME], s3://BUCKET/FOLDER (also gs://, az://) or file:///FOLDER.",
    ),
]


_SHARED = "redis://cache:6379/0"
_AS_OWN = "pass --mine for your own packs, --trust FILE for signed ones"
_REPLACE = "to accept theirs, first remove yours: `kvtool store rm PATH`; --mine or --trust FILE replace your files"


@takes(PushOptions, StoreOptions, examples=(f"store push {_SHARED}", "store push file:///mnt/shared/kv --dry-run"))
def push(run: Run, url: Url) -> int | None:
    """Upload what a shared store (S3, Redis, a folder) lacks. Run it again to resume."""
    from kvtool.core.remote.push import push_to

    with run.out.job() as events:
        report = push_to(url, run.folder, run.get(PushOptions), events)
    return show_transfers(run, [report], report.to_json())


@takes(PullOptions, StoreOptions, examples=(f"store pull {_SHARED}", f"store pull {_SHARED} --level 2,3 --delete"))
def pull(run: Run, url: Url) -> int | None:
    """Download what this store lacks from a shared store. A missing store is created."""
    from kvtool.core.remote.pull import pull_from

    options = run.get(PullOptions)
    if not options.dry_run:
        tell_budget(run, options.max_size)
    with run.out.job() as events:
        report = pull_from(url, run.folder, options, events, run.get(StoreOptions))
    return show_transfers(run, [report], report.to_json())


def show_transfers(run: Run, reports: list[TransferReport], value: dict[str, Any]) -> int | None:
    for report in reports:
        for row in report.damaged:
            run.out.warning(f"left out: {row['subject']}: {row['reason']}")
        tell_origin(run, report)

    def show() -> None:
        for report in reports:
            run.out.print(one_line(_in_words(report)))

    run.out.report(value, human=show)
    return EXIT_DAMAGED if any(report.damaged for report in reports) else None


def tell_origin(run: Run, report: TransferReport) -> None:
    if report.conflicting_files:
        some = ", ".join(report.conflicting_files[:3]) + (" …" if len(report.conflicting_files) > 3 else "")
        run.out.warning(
            f"{counted(len(report.conflicting_files), 'file')} of another origin stayed as they are: {some}", _REPLACE
        )
    if report.model and report.origin:
        run.out.status(f"made with the model {report.model}, as {report.origin} says")
    if not report.trusted and (report.files.transferred or report.chunks.transferred) and not report.dry_run:
        if report.signer is not None:
            tell_signer(run, report.origin, report.signer)
        run.out.status(f"marked as coming from {report.origin}: your own documents do not use its KV; {_AS_OWN}")


def tell_signer(run: Run, place: str, signer: str) -> None:
    """Warn that no trusted key has signed the data; `signer`: "" for nobody."""
    from kvtool.core.remote.signing import UNSIGNED

    if signer:
        run.out.warning(
            f"{place} is signed by {signer}, whom you do not trust", "name that public key with --trust FILE"
        )
    else:
        run.out.warning(f"{place} is not signed", UNSIGNED)


def _in_words(report: TransferReport) -> str:
    what = f"{report.direction} --dry-run" if report.dry_run else report.direction
    would = "would be " if report.dry_run else ""
    removed = f"{report.removed} {would}removed" + (
        f" ({report.bytes_freed / 1e6:,.1f} MB)" if report.bytes_freed else ""
    )
    forgotten = f", {counted(report.documents_removed, 'document')} {would}removed" if report.documents_removed else ""
    moved = f"{counted(report.files.transferred, 'file')} and {counted(report.chunks.transferred, 'chunk')} at a level"
    return (
        f"{what} {report.url}: {moved} {would}moved "
        f"({report.bytes / 1e6:,.1f} MB), {report.files.unchanged} and {report.chunks.unchanged} there already, "
        f"{removed}{forgotten}, {report.seconds:.1f} s"
    )


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
    cls=ManyValues,
)
def export(run: Run, pack: Pack) -> int | None:
    """Write documents, chunks and their KV to one file, a pack."""
    from kvtool.core.remote.packs import export as run_export

    with run.out.job() as events:
        report = run_export(run.folder, pack, run.get(ExportOptions), events)
    for row in report.damaged:
        run.out.warning(f"left out: {row['subject']}: {row['reason']}")

    def show() -> None:
        what = f"{counted(report.documents, 'document')} and {counted(report.chunks, 'chunk')} at a level"
        text = f"written: {report.path}: {what}, {report.bytes / 1e6:,.1f} MB, {report.seconds:.1f} s"
        run.out.print(one_line(text))

    run.out.report(report.to_json(), human=show)
    return EXIT_DAMAGED if report.damaged else None


@takes(
    ImportOptions,
    StoreOptions,
    examples=("store import all.kvpack --trust key.pub", "store import ./kv-1 ./kv-2 --mine --store ./kv"),
)
def import_(run: Run, sources: Sources) -> int | None:
    """Add packs or other stores to this store.

    Packs are the files of `store export`. The model and the settings must be the same. Import the stores of
    `ingest --shard` with --mine. A missing store is created; the sources do not change.
    """
    from kvtool.core.remote.packs import import_sources
    from kvtool.core.session.identity import store_identity
    from kvtool.reports.stored import computed_by, makers

    options = run.get(ImportOptions)
    tell_budget(run, options.max_size)
    with run.out.job() as events:
        reports = import_sources(run.folder, sources, options, run.get(StoreOptions), events)
    with run.open_store() as store:
        made = computed_by(store, store_identity(store))
    if len(several := makers(made)) > 1:
        run.out.status(f"computed {', '.join(several)}: the first question measures what that loses")
    rows = [report.to_json() for report in reports]
    return show_transfers(run, reports, (rows[0] if len(rows) == 1 else {}) | {"merged": rows, "computed_by": made})
