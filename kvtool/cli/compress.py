"""`kvtool compress`: encode stored records with the CacheGen codec."""

from __future__ import annotations

from kvtool.cli.commands import new_app
from kvtool.cli.job_view import JobView
from kvtool.cli.options import Run, takes
from kvtool.cli.parsing import ManyValues
from kvtool.cli.upkeep import tell_budget
from kvtool.core.cache.options import StoreOptions
from kvtool.core.codec.levels import MAX_LOSS, enough_loss, level_of
from kvtool.core.common.sizes import counted
from kvtool.core.compress.compress_report import CompressReport, LevelReport
from kvtool.core.compress.options import CompressOptions

app = new_app()


@app.command(cls=ManyValues)
@takes(CompressOptions, StoreOptions, examples=("compress --fit", "compress --level 3 --level 1 --drop-raw"))
def compress(run: Run) -> None:
    """Encode stored records: small, fast to read, with a loss that is measured and shown."""
    from kvtool.core.compress.job import compress as run_compress

    options = run.get(CompressOptions)
    tell_budget(run, options.max_size)
    with JobView(run) as view:
        report = run_compress(run.folder, options, view.events)
    run.out.report(report.to_json(), human=lambda: _show(run, report))


def _show(run: Run, report: CompressReport) -> None:
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
        f"KV: {report.bytes_before / 1e6:,.1f} MB before, {report.bytes_after / 1e6:,.1f} MB after; "
        f"{counted(report.encoded, 'chunk')} encoded, {report.kept} unchanged, "
        f"{report.skipped} without an exact record, {report.seconds:.1f} s"
    )
    if report.file_after != report.file_before:
        run.out.print(f"data file: {report.file_before / 1e6:,.1f} MB before, {report.file_after / 1e6:,.1f} MB after")
    if report.dropped and report.file_after > report.file_before:
        run.out.status(_why_larger(report))
    _tell_of_losses(run, report)
    if report.dropped and _lacks_rows(report):
        run.out.status(
            "exact records are gone, and the rows that were left out with them; ingest into a new store makes both"
        )
    elif not report.dropped and report.bytes_after > report.bytes_before:
        run.out.status(_of_exact_records(report))


def _why_larger(report: CompressReport) -> str:
    size = (report.profile or {}).get("bytes", 0)
    made = f"the codec's profile takes {size / 1e6:,.1f} MB of it, once, however many chunks there are" if size else ""
    return f"the file is larger all the same: {made or 'levels were added'}"


def _of_exact_records(report: CompressReport) -> str:
    """What to do about exact records that stay. Giving them up is only proposed where questions read what was made."""
    beside = "exact records stay beside these"
    if _lacks_rows(report):
        return f"{beside}; --drop-raw would give them up, and for good the rows that were left out here"
    if all(_loss(level) > MAX_LOSS for level in report.levels):
        return f"{beside}, and questions go on reading them"
    return f"{beside}: the same again, without --fit, with --drop-raw gives them up"


def _lacks_rows(report: CompressReport) -> bool:
    return all(level_of(level.level).share < 100 for level in report.levels)


def _loss(level: LevelReport) -> float:
    return level.loss.get("kl_answer", 0.0)


def _tell_of_losses(run: Run, report: CompressReport) -> None:
    """Which levels a question does not read by itself, although they are there now."""
    for level in report.levels:
        if (loss := _loss(level)) > MAX_LOSS:
            run.out.status(
                f"level {level.level} loses more than the {MAX_LOSS:g} nats a token that questions allow: "
                f"`--level {level.level}` or `--max-loss {enough_loss(loss)}` reads it"
            )
