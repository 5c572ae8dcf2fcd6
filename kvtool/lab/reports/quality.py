"""`kvtool inspect quality`: fusion modes and ratios over a question file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtool.core.common.sizes import counted
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, option
from kvtool.core.query.options import QueryOptions
from kvtool.lab.charts.page import Table
from kvtool.lab.reports.questions import BatchOptions, ResumeOptions
from kvtool.lab.reports.report import RETRIEVAL, Desk, Findings, Report
from kvtool.lab.reports.runs import RUNS, RunOptions, evaluate, read_at

if TYPE_CHECKING:
    from kvtool.lab.measure.runs import RunSpec

ASKED = (*RETRIEVAL, "level", "max_loss")


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions(Options, settings=False, group=RUNS):
    """Options of the references for runs, besides full recompute."""

    no_context: bool = option(False, "Also answer without chunks, and report what share of the gap a run recovers.")
    holdout: bool = option(False, "Choose a run on the first half of the questions, and report it on the second.")
    max_kl: float = option(
        0.05, "Maximum KL divergence of a mode that is recommended, in nats per token.", metavar="NATS", lowest=0
    )


def quality(desk: Desk) -> Findings:
    """Answer questions in every mode and by full recompute. Report quality and speed, with intervals."""
    flags, evidence = desk.get(RunOptions), desk.get(EvidenceOptions)
    requests = desk.get(BatchOptions).requests("quality")
    options = desk.query_options(*ASKED, max_tokens=flags.max_tokens, force=flags.force)
    from kvtool.lab.charts.quality import quality_sections
    from kvtool.lab.measure.holdout import holdout
    from kvtool.lab.measure.quality import overview, quality_rows
    from kvtool.lab.measure.runs import RunSpec, parse_runs
    from kvtool.lab.measure.trial import NO_CONTEXT

    specs = parse_runs(flags.runs)
    begin = partial(quality_rows, warn=desk.events.warn)
    beside = [RunSpec(NO_CONTEXT)] if evidence.no_context else []
    results = evaluate(desk, requests, [*beside, *specs], options, begin)
    value = {"resolved": {"model": desk.identity.model}, "max_tokens": flags.max_tokens, "failed": results.failed}
    value |= overview(results.rows, base_run(flags, specs))
    if evidence.holdout:
        value["holdout"] = holdout(results.rows, evidence.max_kl)
    sections = quality_sections(value, f"{desk.identity.model}, {desk.get(BatchOptions).set_name}")
    return Findings("Fusion quality", value, [*_told(value)], sections, read_at(value), results.exit_code)


def base_run(flags: RunOptions, specs: Sequence[RunSpec]) -> str:
    """Name the run that other runs' KL is held against: the first that was named, else the default of a query."""
    from kvtool.lab.measure.runs import parse_run

    if flags.runs and specs:
        return specs[0].name
    return parse_run(QueryOptions().mode()).name


def _told(value: Mapping[str, Any]) -> Iterator[str | Table]:
    from kvtool.lab.charts.quality import holdout_table, holdout_text, paired_table, paired_text, quality_table

    yield quality_table(value)
    yield f"{counted(value['questions'], 'question')}, {read_at(value)}; in brackets the 95 % interval over questions"
    if len(value["runs"]) > 1:
        yield paired_table(value)
        yield paired_text(value)
    if value.get("holdout"):
        yield holdout_table(value)
        yield holdout_text(value)
    elif "holdout" in value:
        yield "--holdout needs two questions at least"
    if value["with_holes"]:
        yield f"{value['with_holes']} of them lacked chunks of the store: what they say of reuse is too good"


REPORT = Report(
    quality,
    takes=(
        *(BatchOptions, ResumeOptions, RunOptions, EvidenceOptions),
        *(QueryOptions.some(*ASKED), ModelOptions),
    ),
    examples=(
        "inspect quality --batch q.jsonl --runs reuse,union:5% --resume r.jsonl",
        "inspect quality --batch questions.jsonl --no-context --holdout",
    ),
)
