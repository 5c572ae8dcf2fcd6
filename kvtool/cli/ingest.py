"""`kvtool ingest`: read, split, prefill, store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvtool.cli.options import Run, new_app, takes
from kvtool.cli.parsing import size_in_bytes, store_path, system_text
from kvtool.core.corpus.split import SplitSettings
from kvtool.core.errors import EXIT_PARTIAL
from kvtool.core.ingest.report import Events, IngestOptions, IngestReport

app = new_app()


@app.command()
@takes("ingest")
def ingest(
    run: Run,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders.", show_default=False)],
    sync: Annotated[bool, typer.Option("--sync", help="Forget documents below PATH that are gone.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    continue_on_error: Annotated[
        bool, typer.Option("--continue-on-error", help="Go on after a document that fails (exit code 3).")
    ] = False,
    max_size: Annotated[
        str | None, typer.Option("--max-size", metavar="20GB", help="Size budget of the store.", show_default=False)
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", metavar="GLOB", help="Take only these files.", show_default=False)
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Leave these files out.", show_default=False)
    ] = None,
) -> int | None:
    """Read, split, prefill and store documents; only what changed is computed."""
    from kvtool.core.ingest.job import ingest as run_ingest

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
        max_size=size_in_bytes(max_size) if max_size else None,
        continue_on_error=continue_on_error,
        embedder=settings.embedder,
    )
    with _Watch(run) as watch:
        report = run_ingest(store_path(settings.store), options, watch.events)
    for failure in report.failures:
        run.out.warning(f"skipped {failure['path']}: {failure['error']}")
    run.out.result(report.to_json(), human=lambda: _show(run, report))
    return EXIT_PARTIAL if report.failures else None


def _split(run: Run) -> SplitSettings:
    settings = run.settings
    longest = settings.max_chunk_tokens or settings.chunk_tokens
    return SplitSettings(settings.split, longest, settings.min_tokens)


class _Watch:
    """Shows progress while chunks are computed: a bar from the moment their number is known."""

    def __init__(self, run: Run) -> None:
        self._out = run.out
        self._progress: Any = None
        self._bar: Any = None
        self.events = Events(warn=self._out.warning, total=self._total, advance=self._advance, status=self._out.detail)

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._progress is not None:
            self._progress.__exit__(*error)

    def _total(self, tokens: int) -> None:
        self._progress = self._out.progress("prefill", total=tokens)
        self._bar = self._progress.__enter__()

    def _advance(self, tokens: int) -> None:
        if self._bar is not None:
            self._bar.advance(tokens)


def _show(run: Run, report: IngestReport) -> None:
    if run.out.verbosity < 0:  # a report, not data
        return
    documents, chunks = report.documents, report.chunks
    would = "would be " if report.dry_run else ""
    run.out.print(
        f"documents: {documents.added} {would}added, {documents.changed} changed, {documents.unchanged} unchanged, "
        f"{documents.removed} removed, {documents.failed} failed"
    )
    run.out.print(f"chunks: {chunks.computed} {would}computed, {chunks.reused} reused, {chunks.removed} removed")
    if report.dry_run:
        run.out.print(f"tokens to compute: {report.tokens:,}")
        return
    speed = report.prefill_tokens_per_second
    rate = f" at {speed:,.0f} tokens/s" if speed else ""
    run.out.print(f"{report.tokens:,} tokens{rate}, {report.kv_bytes / 1e6:,.1f} MB of KV, {report.seconds:.1f} s")
