"""`kvtool compress`: encode stored records with the CacheGen codec."""

from __future__ import annotations

from dataclasses import replace

from kvtool.cli.options import ManyValues, Run, takes, tell_budget
from kvtool.core.cache.options import StoreOptions
from kvtool.core.codec.levels import DEFAULT_LOSSY, enough_loss, level_of, shown_loss
from kvtool.core.common.text import counted, shown_size
from kvtool.core.compress.options import CompressOptions, CompressReport, LevelReport


@takes(
    CompressOptions,
    StoreOptions,
    examples=("compress", "compress --level 3 --level 1 --drop-raw"),
    common="levels max_loss keep keep_raw chunks questions fit max_size store model device",
    cls=ManyValues,
)
def compress(run: Run) -> None:
    """Make the stored KV caches several times smaller, and measure what that loses.

    The first run fits the codec to the stored KV.
    """
    options = run.get(CompressOptions)
    if options.max_loss is None:
        options = replace(options, levels=options.levels or (DEFAULT_LOSSY,), max_loss=run.max_loss)
    tell_budget(run, options.max_size)
    report = _compress(run, options)
    run.out.report(report.to_json(), human=lambda: _show(run, options, report))


def _compress(run: Run, options: CompressOptions) -> CompressReport:
    from kvtool.core.compress.job import compress as run_compress

    with run.out.job() as events:
        return run_compress(run.folder, options, events)


def _show(run: Run, options: CompressOptions, report: CompressReport) -> None:
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
        f"{counted(report.encoded, 'chunk')} encoded, {report.kept} unchanged, "
        f"{report.skipped} without an exact record, {report.seconds:.1f} s"
    )
    if report.fitted:
        _tell_of_profile(run, report)
    _tell_of_losses(run, report)
    if report.dropped and _lacks_rows(report):
        run.out.status(
            "exact records are gone, and the rows that were left out with them; ingest into a new store makes both"
        )
    elif report.file_without_exact is not None and not _is_offered(report):
        run.out.status(_why_they_stay(report))
    run.out.print(_result(report))


def _result(report: CompressReport) -> str:
    sizes = [f"was {shown_size(report.file_before)}"]
    if report.file_without_exact is not None:
        way = ": --drop-raw" if _is_offered(report) else ""
        sizes.append(f"{shown_size(report.file_without_exact)} without the exact records{way}")
    lost = shown_loss(report.loss, report.max_loss)
    if not any(level.chunks for level in report.levels):
        lost = f"no chunk is stored at {' or '.join(level.level for level in report.levels)}"
    return f"{shown_size(report.file_after)} ({'; '.join(sizes)}); {lost}"


def _is_offered(report: CompressReport) -> bool:
    return report.file_without_exact is not None and report.is_allowed and not _lacks_rows(report)


def _why_they_stay(report: CompressReport) -> str:
    if _lacks_rows(report):
        return "exact records stay: --drop-raw would give them up, and for good the rows that were left out here"
    if report.loss is None:
        return "exact records stay: --drop-raw asks for a measured loss, so leave --questions 0 out"
    return "exact records stay, and questions go on reading them"


def _tell_of_profile(run: Run, report: CompressReport) -> None:
    size, level = (report.profile or {}).get("bytes", 0), max(report.levels, key=lambda level: level.bytes)
    if level.chunks and level_of(level.level).profiled and size > level.bytes > 0:
        run.out.status(
            f"the codec's profile takes {shown_size(size)}, once, more than the {shown_size(level.bytes)} of "
            f"{counted(level.chunks, 'chunk')}: it pays in a larger store, or with --profile STORE"
        )


def _lacks_rows(report: CompressReport) -> bool:
    return all(level_of(level.level).share < 100 for level in report.levels)


def _loss(level: LevelReport) -> float:
    return level.loss.get("kl_answer", 0.0)


def _tell_of_losses(run: Run, report: CompressReport) -> None:
    allowed = run.max_loss
    for level in report.levels:
        if (loss := _loss(level)) > allowed:
            run.out.status(
                f"level {level.level} loses more than the {allowed:g} nats a token that questions allow: "
                f"`--level {level.level}` or `--set load.max_loss={enough_loss(loss)}` reads it"
            )
