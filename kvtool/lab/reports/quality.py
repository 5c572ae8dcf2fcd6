"""`kvtool inspect quality`: fusion modes and ratios over a question file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.lab.charts.page import Table
from kvtool.lab.reports.questions import BatchOptions, ResumeOptions
from kvtool.lab.reports.report import RETRIEVAL, Desk, Findings, Report
from kvtool.lab.reports.runs import RunOptions, evaluate, read_at

_ASKED = (*RETRIEVAL, "level", "max_loss")


def quality(desk: Desk) -> Findings:
    """Answer questions in every mode beside full recompute: how near each comes, how fast, and how sure that is."""
    flags = desk.get(RunOptions)
    if flags.defer:
        from kvtool.lab.reports.defer import calibrate

        return calibrate(desk)
    requests = desk.get(BatchOptions).requests("quality")
    options = desk.query_options(*_ASKED, max_tokens=flags.max_tokens, force=flags.force)
    from kvtool.lab.charts.quality import quality_sections
    from kvtool.lab.measure.quality import overview, quality_rows
    from kvtool.lab.measure.runs import parse_runs

    begin = partial(quality_rows, warn=desk.events.warn)
    results = evaluate(desk, requests, parse_runs(flags.runs), options, begin)
    value = {"resolved": {"model": desk.identity.model}, "max_tokens": flags.max_tokens, "failed": results.failed}
    value |= overview(results.rows)
    sections = quality_sections(value)
    return Findings("Fusion quality", value, [*_told(value)], sections, read_at(value), results.exit_code)


def _told(value: Mapping[str, Any]) -> Iterator[str | Table]:
    from kvtool.lab.charts.quality import quality_table

    yield quality_table(value)
    yield f"{value['questions']} questions, {read_at(value)}; in brackets the 95 % interval over questions"
    if value["with_holes"]:
        yield f"{value['with_holes']} of them lacked chunks of the store: what they say of reuse is too good"


REPORT = Report(
    quality,
    takes=(BatchOptions, ResumeOptions, RunOptions, QueryOptions.some(*_ASKED, "defer_first"), ModelOptions),
    examples=(
        "inspect quality --batch questions.jsonl --runs reuse,union:5%,union:15% --resume results.jsonl",
        "inspect quality --batch questions.jsonl --defer --runs union",
    ),
)
