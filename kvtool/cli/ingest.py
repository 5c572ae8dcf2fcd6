"""`kvtool ingest`: read, split, prefill, store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli.options import Run, new_app, takes
from kvtool.cli.out import error_json
from kvtool.cli.parsing import store_path, system_text
from kvtool.cli.upkeep import BUDGET, budget_of_run
from kvtool.cli.watch import Watch
from kvtool.core.corpus.split import SplitSettings
from kvtool.core.errors import EXIT_DONE, EXIT_FAILED, EXIT_PARTIAL, KvtoolError
from kvtool.core.ingest.ingest_report import IngestOptions, IngestReport
from kvtool.core.ingest.log import EventLog

app = new_app()


@app.command()
@takes("ingest")
def ingest(
    run: Run,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders.", show_default=False)],
    sync: Annotated[bool, typer.Option("--sync", help="Forget documents below PATH that are gone.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    continue_on_error: Annotated[
        bool,
        typer.Option("--continue-on-error/--fail-fast", help="After a file that fails: go on (exit code 3), or stop."),
    ] = True,
    max_size: Annotated[
        str | None, typer.Option("--max-size", metavar="20GB", help=BUDGET, show_default="the store's own")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", metavar="GLOB", help="Take only these files.", show_default=False)
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Leave these files out.", show_default=False)
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log", metavar="FILE.jsonl", help="Append what happens, one JSON event a line.", show_default=False
        ),
    ] = None,
) -> int | None:
    """Read, split, prefill and store documents; only what changed is computed."""
    settings, resolved = run.settings, run.resolved
    split_given = any(resolved.given(key) for key in ("split", "chunk_tokens", "min_tokens", "max_chunk_tokens"))
    options = IngestOptions(
        paths=tuple(paths),
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        offline=settings.offline,
        lock_wait=settings.lock_wait,
        split=_split(run) if split_given else None,
        lead_in=settings.lead_in if resolved.given("lead_in") else None,
        system=system_text(settings.system),
        level=settings.ingest_level,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        sync=sync,
        dry_run=dry_run,
        max_size=budget_of_run(run, max_size),
        fail_fast=not continue_on_error,
        embedder=settings.embedder,
        log=None if log is None else log.expanduser(),
    )
    report = _ingest(run, options)
    run.out.result(report.to_json(), human=lambda: _show(run, report))
    return _code(report)


def _code(report: IngestReport) -> int:
    return EXIT_PARTIAL if report.failures else EXIT_DONE


def _ingest(run: Run, options: IngestOptions) -> IngestReport:
    """Do it, shown on the terminal and written to the log."""
    from kvtool.core.ingest.job import ingest as run_ingest

    log = options.log
    book = EventLog(log) if log is not None else None
    try:
        place = store_path(run.settings.store)
        if book:
            book.event("status", message="started", store=str(place), paths=list(map(str, options.paths)))
        with Watch(run) as watch:
            events = book.listening(watch.events) if book else watch.events
            report = run_ingest(place, options, events)
        if book:
            book.event("summary", **report.to_json(), exit_code=_code(report))
        return report
    except BaseException as raised:
        if book:
            _log_end(book, raised)
        raise
    finally:
        if book:
            book.close()
            if book.error:
                run.out.warning(f"the log {log} is not complete: {book.error}")


def _log_end(book: EventLog, raised: BaseException) -> None:
    """The last event of a run that ends in an error: what the terminal is told of it."""
    from kvtool.cli.app import explain

    error, code = explain(raised) or (KvtoolError(type(raised).__name__), EXIT_FAILED)
    book.event("error", error=error_json(error, code))


def _split(run: Run) -> SplitSettings:
    settings = run.settings
    longest = settings.max_chunk_tokens or settings.chunk_tokens
    return SplitSettings(settings.split, longest, settings.min_tokens)


def _show(run: Run, report: IngestReport) -> None:
    if run.out.verbosity < 0:  # a report, not data
        return
    documents, chunks = report.documents, report.chunks
    would = "would be " if report.dry_run else ""
    run.out.print(
        f"documents: {documents.added} {would}added, {documents.changed} changed, {documents.unchanged} unchanged, "
        f"{documents.removed} removed, {documents.failed} failed"
    )
    if any(report.skipped.values()):
        kinds = ", ".join(f"{count} {kind}" for kind, count in report.skipped.items() if count)
        run.out.print(f"files skipped: {kinds} (-v names them)")
    run.out.print(f"chunks: {chunks.computed} {would}computed, {chunks.reused} reused, {chunks.removed} removed")
    if report.dry_run:
        run.out.print(f"tokens to compute: {report.tokens:,}")
        return
    speed = report.prefill_tokens_per_second
    rate = f" at {speed:,.0f} tokens/s" if speed else ""
    run.out.print(f"{report.tokens:,} tokens{rate}, {report.kv_bytes / 1e6:,.1f} MB of KV, {report.seconds:.1f} s")
