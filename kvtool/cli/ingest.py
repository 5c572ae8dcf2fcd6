"""`kvtool ingest`: read, split, prefill, store; `kvtool watch` does it again whenever files change."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kvtool.cli.options import Run, takes, tell_budget
from kvtool.cli.out import error_json, plain
from kvtool.cli.terminal import one_line
from kvtool.core.cache.options import StoreOptions
from kvtool.core.codec.levels import level_of, shown_loss
from kvtool.core.common.text import counted
from kvtool.core.corpus.walk import Skip
from kvtool.core.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PARTIAL,
    EXIT_TERMINATED,
    KvtoolError,
    UsageError,
)
from kvtool.core.ingest.options import IngestOptions, WatchOptions
from kvtool.core.ingest.report import PHASES, Documents, EventLog, IngestReport
from kvtool.core.options.option import options_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtool.core.ingest.watcher import Watcher


@takes(
    IngestOptions,
    StoreOptions,
    examples=("ingest docs --sync", "ingest docs notes.md --chunk-tokens 128 --level lossless"),
    common="include exclude sync lazy dry_run split chunk_tokens level system embedder max_size store model device",
)
def ingest(
    run: Run,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders.", show_default=False)],
) -> int | None:
    """Read documents and store each passage's KV cache. Only changes are computed."""
    options = replace(run.get(IngestOptions), paths=tuple(paths))
    tell_budget(run, options.max_size)
    report = _ingest(run, options)
    is_lossy = report.chunks.computed > 0 and not options.dry_run and not level_of(options.level).lossless
    if is_lossy and (report.loss is None or report.loss > run.max_loss):
        run.out.warning(*_what_is_lost(options.level, report.loss, run.max_loss))
    run.out.report(report.to_json(), human=lambda: _show(run, report))
    if is_lossy and run.out.verbosity >= 0:
        run.out.print(f"level {options.level}, no exact records; {shown_loss(report.loss, run.max_loss)}")
    return _code(report)


def _code(report: IngestReport) -> int:
    return EXIT_PARTIAL if report.failures else EXIT_DONE


def _what_is_lost(level: str, loss: float | None, allowed: float) -> tuple[str, str]:
    if loss is None:
        return (
            f"the loss of level {level} is not measured here, and the store has no exact records to measure it on",
            "ingest without --level, then `kvtool compress --drop-raw` measures it before exact KV is removed",
        )
    return (
        f"level {level} loses {loss:.4f} nats a token, more than the {allowed:g} that questions allow",
        "ingest into a new store for a finer level or exact records",
    )


def _ingest(run: Run, options: IngestOptions) -> IngestReport:
    from kvtool.core.ingest.job import ingest as run_ingest

    log = options.log
    book = EventLog(log) if log is not None else None
    try:
        place = run.folder
        if book:
            book.event("status", message="started", store=str(place), paths=list(map(str, options.paths)))
        run.out.doing("reading files")
        with run.out.job() as events:
            report = run_ingest(place, options, book.listening(events) if book else events)
        if book:
            book.event("summary", **plain(report.to_json()), exit_code=_code(report))
        return report
    except BaseException as raised:
        if book:
            from kvtool.cli.app import explain

            error, code = explain(raised) or (KvtoolError(type(raised).__name__), EXIT_FAILED)
            book.event("error", error=error_json(error, code))
        raise
    finally:
        if book:
            book.close()
            if book.error:
                run.out.warning(f"the log {log} is not complete: {book.error}")


def _show(run: Run, report: IngestReport) -> None:
    documents, chunks = report.documents, report.chunks
    would = "would be " if report.dry_run else ""
    run.out.print(
        f"documents: {documents.added} {would}added, {documents.changed} changed, {documents.unchanged} unchanged, "
        f"{documents.removed} removed, {documents.failed} failed"
    )
    if report.known_failures:
        run.out.print(known_failures(report))
    if any(report.skipped.values()):
        kinds = {kind: count for kind, count in report.skipped.items() if kind != Skip.UNSUPPORTED} | report.unsupported
        listed = ", ".join(_counted(count, kind) for kind, count in kinds.items() if count)
        run.out.print(f"files skipped: {listed}{' (-v names them)' if run.out.verbosity == 0 else ''}")
    run.out.print(f"chunks: {chunks.computed} {would}computed, {chunks.reused} reused, {chunks.removed} removed")
    if report.dry_run:
        run.out.print(f"tokens to compute: {report.tokens:,}")
        if report.forecast is not None:
            run.out.print(report.forecast.text())
            if advice := report.forecast.advice():
                run.out.print(advice)
        return
    speed, computed = report.prefill_tokens_per_second, ""
    if report.tokens:
        rate = f" at {speed:,.0f} tokens/s" if speed else ""
        computed = f"{report.tokens:,} tokens{rate}, {report.kv_bytes / 1e6:,.1f} MB of KV, "
    run.out.print(f"{computed}{report.seconds:.1f} s in all")
    if (left := report.left) is not None:
        run.out.print(
            f"{left.tokens:,} tokens in {counted(left.chunks, 'chunk')} have no KV yet ({_WHY_LEFT[left.reason]}); "
            "the next ingest continues"
        )
    if run.out.verbosity > 0:
        run.out.prose(_time_of(report))


def known_failures(report: IngestReport) -> str:
    first, *others = report.known_failures
    more = f", and {len(others)} more: -v names them" if others else f": {first['error']}"
    documents = counted(len(report.known_failures), "document is", "documents are")
    return one_line(f"{documents} still unreadable, as before ({first['path']}{more})")


def _counted(count: int, kind: str) -> str:
    return counted(count, kind) if kind in ("image", "archive") else f"{count} {kind}"


def _time_of(report: IngestReport) -> str:
    parts = [
        f"{report.phase['texts']:.1f} s until all texts were stored",
        f"{report.prefill_seconds:.1f} s computing chunks",
    ]
    parts += [f"{report.phases[name]:.1f} s {what}" for name, what in PHASES.items() if name in report.phases]
    return f"of these {', '.join(parts)}"


_WHY_LEFT = {
    "lazy": "--lazy",
    "time": "--for",
    "size": "the size budget is full",
    "changes": "files changed",
    "damage": "damaged: see `kvtool store verify`",
}
# it syncs, continues after errors, and reports each file at once
_NOT_HERE = ("sync", "dry_run", "continue_on_error", "log")
_TAKEN = [name for name in options_of(IngestOptions) if name not in _NOT_HERE]


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
