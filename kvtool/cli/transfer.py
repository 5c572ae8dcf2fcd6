"""`kvtool store push|pull|sync`: a store that several machines share."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli.job_view import JobView
from kvtool.cli.options import Run, takes
from kvtool.cli.text import one_line
from kvtool.cli.upkeep import tell_budget
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.common.sizes import counted
from kvtool.core.errors import EXIT_DAMAGED
from kvtool.core.remote.options import PullOptions, PushOptions, RemoteOptions, SignOptions, TrustOptions

if TYPE_CHECKING:
    from kvtool.core.remote.transfer_report import TransferReport

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="redis://HOST:PORT/DB[?prefix=NAME], s3://BUCKET/FOLDER (also gs://, az://) or file:///FOLDER.",
    ),
]


_SHARED = "redis://cache:6379/0"
_AS_OWN = "--mine takes what you made yourself, --trust FILE what a key of FILE has signed"
_REPLACE = "`kvtool store forget PATH` makes way for one; --mine or --trust FILE say whose files may replace yours"


@takes(PushOptions, StoreOptions, examples=(f"store push {_SHARED}", "store push file:///mnt/shared/kv --dry-run"))
def push(run: Run, url: Url) -> int | None:
    """Send what a shared store lacks.

    It is incremental, and resumed by running it again.
    """
    from kvtool.core.remote.by_url import push_to

    with JobView(run) as view:
        report = push_to(url, run.folder, run.get(PushOptions), view.events)
    return told(run, [report], report.to_json())


@takes(PullOptions, StoreOptions, examples=(f"store pull {_SHARED}", f"store pull {_SHARED} --level 2,3 --delete"))
def pull(run: Run, url: Url) -> int | None:
    """Fetch what this store lacks.

    The store is made where there is none.
    """
    from kvtool.core.remote.by_url import pull_from

    options = run.get(PullOptions)
    if not options.dry_run:
        tell_budget(run, options.max_size)
    with JobView(run) as view:
        report = pull_from(url, run.folder, options, view.events, run.get(StoreOptions))
    return told(run, [report], report.to_json())


@takes(
    StoreOptions,
    LockOptions,
    RemoteOptions,
    TrustOptions,
    SignOptions,
    examples=(f"store sync {_SHARED}", "store sync file:///mnt/shared/kv --mine"),
)
def sync(run: Run, url: Url) -> int | None:
    """Pull, then push.

    Of a file that both have in two versions the one changed last stays.
    """
    from kvtool.core.remote.pull import sync as run_sync
    from kvtool.core.remote.urls import open_blobs

    timeout, trust = run.get(RemoteOptions).remote_timeout, run.get(TrustOptions).trusted(run.get(StoreOptions))
    key = run.get(SignOptions).key
    with closing(open_blobs(url, timeout)) as blobs, JobView(run) as view:
        reports = run_sync(run.folder, blobs, trust=trust, key=key, lock_wait=run.lock_wait, events=view.events)
    return told(run, reports, {report.direction: report.to_json() for report in reports})


def told(run: Run, reports: list[TransferReport], value: dict[str, Any]) -> int | None:
    for report in reports:
        for row in report.damaged:
            run.out.warning(f"left out: {row['what']}: {row['reason']}")
        tell_origin(run, report)

    def show() -> None:
        for report in reports:
            run.out.print(one_line(_in_words(report)))

    run.out.report(value, human=show)
    return EXIT_DAMAGED if any(report.damaged for report in reports) else None


def tell_origin(run: Run, report: TransferReport) -> None:
    """Tell the user what came from somebody who is not trusted, and what that means."""
    if report.kept:
        some = ", ".join(report.kept[:3]) + (" …" if len(report.kept) > 3 else "")
        run.out.warning(f"{counted(len(report.kept), 'file')} of another origin stayed as they are: {some}", _REPLACE)
    if report.made_with and report.origin:
        run.out.status(f"made with the model {report.made_with}, as {report.origin} says")
    if not report.trusted and (report.files.moved or report.chunks.moved) and not report.dry_run:
        if report.signer is not None:
            tell_signer(run, report.origin, report.signer)
        run.out.status(f"noted to be from {report.origin}: your own documents use none of its KV; {_AS_OWN}")


def tell_signer(run: Run, place: str, signer: str) -> None:
    """Tell the user that none of the trusted keys has signed something; `signer`: "" for nobody."""
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
    forgotten = f", {counted(report.forgotten, 'document')} {would}forgotten" if report.forgotten else ""
    moved = f"{counted(report.files.moved, 'file')} and {counted(report.chunks.moved, 'chunk')} at a level"
    return (
        f"{what} {report.url}: {moved} {would}moved "
        f"({report.bytes / 1e6:,.1f} MB), {report.files.unchanged} and {report.chunks.unchanged} there already, "
        f"{removed}{forgotten}, {report.seconds:.1f} s"
    )
