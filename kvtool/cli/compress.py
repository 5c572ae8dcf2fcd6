"""`kvtool compress`: encode stored records with the CacheGen codec."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli.options import Run, new_app, takes
from kvtool.cli.parsing import ManyValues
from kvtool.cli.upkeep import BUDGET, budget_of_run
from kvtool.cli.watch import Watch
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.compress.compress_report import CompressOptions, CompressReport
from kvtool.core.model.options import ModelOptions

app = new_app()
PREDICTORS = ("auto", "mean", "anchor")


@app.command(cls=ManyValues)
@takes(ModelOptions, StoreOptions, LockOptions)
def compress(
    run: Run,
    level: Annotated[
        list[str] | None,
        typer.Option("--level", metavar="1..4|auto|lossless", help="What to store; 1 is the finest.", show_default="2"),
    ] = None,
    keep_raw: Annotated[
        bool, typer.Option("--keep-raw/--drop-raw", help="Whether exact records stay once the others were read back.")
    ] = True,
    fit: Annotated[bool, typer.Option("--fit", help="Learn the codec's profile from this store first.")] = False,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="STORE", help="Take another store's profile.", show_default=False),
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option("--max-loss", metavar="X", min=0, help="What `auto` may lose (nats a token).", show_default=False),
    ] = None,
    chunks: Annotated[
        list[str] | None, typer.Option("--chunks", metavar="ID", help="Only these chunks.", show_default=False)
    ] = None,
    predictor: Annotated[
        str, typer.Option("--predictor", metavar="|".join(PREDICTORS), help="`anchor` is the paper's scheme.")
    ] = "auto",
    max_size: Annotated[
        str | None,
        typer.Option("--max-size", metavar="20GB", help=BUDGET, show_default="the store's own"),
    ] = None,
    questions: Annotated[
        int, typer.Option("--questions", min=0, help="How many prompts the loss is measured on; 0: it is not.")
    ] = 8,
) -> None:
    """Encode stored records: small, fast to read, with a loss that is measured and shown."""
    from kvtool.core.compress.job import compress as run_compress
    from kvtool.core.errors import UsageError

    if fit and profile is not None:
        raise UsageError("--fit and --profile exclude each other", "give one of them")
    if predictor not in PREDICTORS:
        raise UsageError(f"there is no predictor {predictor!r}", f"known: {', '.join(PREDICTORS)}")
    wanted = run.get(ModelOptions)
    options = CompressOptions(
        levels=tuple(level or ()),
        chunks=tuple(chunks or ()),
        keep_raw=keep_raw,
        fit=fit,
        profile=profile,
        max_loss=max_loss,
        predictor=predictor,
        questions=questions,
        max_size=budget_of_run(run, max_size),
        model=wanted.model,
        device=wanted.device,
        dtype=wanted.dtype,
        offline=wanted.offline,
        lock_wait=run.lock_wait,
    )
    with Watch(run) as watch:
        report = run_compress(run.folder, options, watch.events)
    run.out.result(report.to_json(), human=lambda: _show(run, report))


def _show(run: Run, report: CompressReport) -> None:
    if run.out.verbosity < 0:  # a report, not data
        return
    rows = []
    for level in report.levels:
        row = level.to_json()
        lost = "-" if "kl_answer" not in row else f"{row['kl_answer']:.4f}"
        agrees = "-" if "top1_agrees" not in row else f"{row['top1_agrees']:.1%}"
        error = f"{row['relative_error']:.4f}"
        ratios = [f"{row[name]:.2f}x" if row[name] else "-" for name in ("ratio_vs_16bit", "ratio_vs_8bit")]
        megabytes = f"{row['bytes'] / 1e6:,.1f}"
        rows.append((row["level"], row["chunks"], megabytes, row["bits_per_element"], *ratios, error, lost, agrees))
    head = ("level", "chunks", "MB", "bits/element", "of 16 bit", "of 8 bit", "error", "KL of answers", "same tokens")
    run.out.table(head, rows)
    run.out.print(
        f"store: {report.bytes_before / 1e6:,.1f} MB before, {report.bytes_after / 1e6:,.1f} MB after; "
        f"{report.encoded} chunks encoded, {report.kept} unchanged, {report.skipped} without an exact record, "
        f"{report.seconds:.1f} s"
    )
    if report.compacted:
        run.out.print(f"{report.compacted / 1e6:,.1f} MB given back to the disk")
