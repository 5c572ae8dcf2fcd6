"""`kvtool watch`: ingest what changes, until it is ended."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kvtool.cli.commands import new_app
from kvtool.cli.ingest import known_failures
from kvtool.cli.options import Run, takes, tell_budget
from kvtool.cli.terminal import one_line
from kvtool.core.cache.options import StoreOptions
from kvtool.core.common.sizes import counted
from kvtool.core.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, UsageError
from kvtool.core.ingest.options import IngestOptions, WatchOptions
from kvtool.core.ingest.report import Documents, IngestReport
from kvtool.core.options.option import options_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtool.core.ingest.watcher import Watcher

# it syncs, continues after errors, and reports each file at once
_NOT_HERE = ("sync", "retry", "strict", "dry_run", "continue_on_error", "log")
_TAKEN = [name for name in options_of(IngestOptions) if name not in _NOT_HERE]

app = new_app()


@app.command()
@takes(
    WatchOptions.some("debounce", *_TAKEN),
    StoreOptions,
    examples=("watch docs notes.md", "watch docs --exclude drafts --debounce 5s"),
    common="include exclude debounce split chunk_tokens level system embedder max_size store model device",
)
def watch(
    run: Run,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders.", show_default=False)],
) -> None:
    """Ingest files and folders again whenever they change, until Ctrl-C; remove deleted files."""
    options = replace(run.get(WatchOptions), paths=tuple(paths))
    if run.out.mode == "json":
        raise UsageError("a watch has no end, and so no one JSON object", "--jsonl prints an event a line")
    tell_budget(run, options.max_size)
    _watch(run, options)


def _watch(run: Run, options: WatchOptions) -> NoReturn:
    from kvtool.core.ingest.watcher import Watcher

    done = Documents()
    try:
        with closing(Watcher(run.folder, options)) as watcher:
            _tell_start(run, options, _round(run, watcher, done, catching_up=True))
            while True:
                run.out.idle()
                watcher.wait()
                _round(run, watcher, done)
    except KeyboardInterrupt as ended:
        _tell_end(run, done)
        raise typer.Exit(EXIT_INTERRUPTED) from ended
    except SystemExit as ended:
        if ended.code == EXIT_TERMINATED:
            _tell_end(run, done)
        raise


def _round(run: Run, watcher: Watcher, done: Documents, catching_up: bool = False) -> IngestReport | None:
    with run.out.job() as events:
        report = watcher.round(replace(events, took=_teller(run, quiet=catching_up)))
    if report is not None:
        run.out.event("summary", **report.to_json())
        for name, count in asdict(report.documents).items():
            setattr(done, name, getattr(done, name) + count)
    return report


def _tell_end(run: Run, done: Documents) -> None:
    run.out.status(
        f"no longer watching: {done.added} added, {done.changed} changed, {done.removed} removed; "
        "the next start ingests what changed meanwhile"
    )


def _teller(run: Run, quiet: bool) -> Callable[[str, str, int], None]:
    out = run.out

    def took(path: str, what: str, chunks: int) -> None:
        line = f"{what} {path}" + (f": {counted(chunks, 'chunk')}" if chunks else "")
        out.event("status", message=line, path=path, change=what, chunks=chunks)
        if out.verbosity >= (1 if quiet else 0):
            out.print(one_line(line))

    return took


def _tell_start(run: Run, options: WatchOptions, report: IngestReport | None) -> None:
    if report is not None:
        done = report.documents
        run.out.status(
            f"up to date: {done.added} documents added, {done.changed} changed, {done.unchanged} unchanged, "
            f"{done.removed} removed"
        )
        if report.known_failures:
            run.out.status(known_failures(report))
    run.out.status(f"watching {', '.join(map(str, options.paths))} (Ctrl-C ends it)")
