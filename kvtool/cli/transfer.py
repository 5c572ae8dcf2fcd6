"""`kvtool store push|pull|sync`: a store that several machines share."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli.options import Run, takes
from kvtool.cli.parsing import list_of
from kvtool.cli.upkeep import BUDGET, budget_of_run
from kvtool.cli.watch import Watch
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.codec.levels import check_level
from kvtool.core.errors import EXIT_DAMAGED
from kvtool.core.remote.options import RemoteOptions

if TYPE_CHECKING:
    from kvtool.core.remote.transfer_report import TransferReport

Url = Annotated[str, typer.Argument(metavar="URL", help="redis://HOST:PORT/DB[?prefix=NAME] or file:///FOLDER.")]


@takes(StoreOptions, RemoteOptions)
def push(
    run: Run,
    url: Url,
    delete: Annotated[bool, typer.Option("--delete", help="Forget there what the store does not have.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read back what is there, and send again what is damaged.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; count what would be sent and deleted.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Let --delete take more than half of what is there.")] = False,
) -> int | None:
    """Send what a shared store lacks.

    It is incremental, and resumed by running it again.
    """
    from kvtool.core.cache.store import Store
    from kvtool.core.remote.push import push as run_push
    from kvtool.core.remote.urls import open_blobs

    timeout = run.get(RemoteOptions).remote_timeout
    with (
        closing(open_blobs(url, timeout)) as blobs,
        Store.open(run.folder) as store,
        Watch(run) as watch,
    ):
        report = run_push(store, blobs, delete=delete, verify=verify, dry_run=dry_run, yes=yes, events=watch.events)
    return told(run, [report], report.to_json())


@takes(StoreOptions, LockOptions, RemoteOptions)
def pull(
    run: Run,
    url: Url,
    level: Annotated[
        list[str] | None, typer.Option("--level", metavar="LEVEL", help="Only KV of these levels.", show_default="all")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Forget files that are not there.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; count what would be fetched and forgotten.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Let --delete take more than half of the files.")] = False,
    max_size: Annotated[
        str | None, typer.Option("--max-size", metavar="20GB", help=BUDGET, show_default="the store's own")
    ] = None,
) -> int | None:
    """Fetch what this store lacks.

    The store is made where there is none.
    """
    from kvtool.core.remote.pull import preview
    from kvtool.core.remote.pull import pull as run_pull
    from kvtool.core.remote.urls import open_blobs

    timeout = run.get(RemoteOptions).remote_timeout
    levels = [check_level(one) for one in list_of(level)] or None
    if dry_run:
        with closing(open_blobs(url, timeout)) as blobs:
            report = preview(run.folder, blobs, levels=levels, delete=delete)
        return told(run, [report], report.to_json())
    budget = budget_of_run(run, max_size)
    with closing(open_blobs(url, timeout)) as blobs, Watch(run) as watch:
        report = run_pull(
            run.folder,
            blobs,
            levels=levels,
            delete=delete,
            lock_wait=run.lock_wait,
            max_size=budget,
            timeout=timeout,
            yes=yes,
            events=watch.events,
        )
    return told(run, [report], report.to_json())


@takes(StoreOptions, LockOptions, RemoteOptions)
def sync(run: Run, url: Url) -> int | None:
    """Pull, then push.

    Of a file that both have in two versions the one changed last stays.
    """
    from kvtool.core.remote.pull import sync as run_sync
    from kvtool.core.remote.urls import open_blobs

    timeout = run.get(RemoteOptions).remote_timeout
    with closing(open_blobs(url, timeout)) as blobs, Watch(run) as watch:
        reports = run_sync(run.folder, blobs, lock_wait=run.lock_wait, events=watch.events)
    return told(run, reports, {report.direction: report.to_json() for report in reports})


def told(run: Run, reports: list[TransferReport], value: dict[str, Any]) -> int | None:
    for report in reports:
        for row in report.damaged:
            run.out.warning(f"left out: {row['what']}: {row['reason']}")

    def show() -> None:
        for one in reports:
            run.out.print(_in_words(one))

    run.out.result(value, human=show)
    return EXIT_DAMAGED if any(report.damaged for report in reports) else None


def _in_words(one: TransferReport) -> str:
    what = f"{one.direction} --dry-run" if one.dry_run else one.direction
    would = "would be " if one.dry_run else ""
    removed = f"{one.removed} {would}removed" + (f" ({one.removed_bytes / 1e6:,.1f} MB)" if one.removed_bytes else "")
    forgotten = f", {one.forgotten} documents {would}forgotten" if one.forgotten else ""
    return (
        f"{what} {one.url}: {one.files.moved} files and {one.chunks.moved} chunks at a level {would}moved "
        f"({one.bytes / 1e6:,.1f} MB), {one.files.there} and {one.chunks.there} there already, "
        f"{removed}{forgotten}, {one.seconds:.1f} s"
    )
