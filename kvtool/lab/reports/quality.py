"""`kvtool inspect quality`: fusion modes and ratios over a question file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtool.core.errors import EXIT_FAILED, EXIT_PARTIAL
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, option
from kvtool.core.query.options import QueryOptions
from kvtool.lab.charts.page import Table
from kvtool.lab.reports.questions import BatchOptions, ResumeOptions
from kvtool.lab.reports.report import RETRIEVAL, Desk, Findings, Report

if TYPE_CHECKING:
    from kvtool.core.query.reply import Request
    from kvtool.core.session.session import Session
    from kvtool.lab.measure.evaluation import RowsOf
    from kvtool.lab.measure.journal import Journal
    from kvtool.lab.measure.runs import RunSpec

RUNS = "Runs"  # the heading in the report's help
_ASKED = (*RETRIEVAL, "level", "max_loss")
_HEAD = (
    *("run", "n", "F1", "of full", "contains", "KL first", "KL answer", "same answer"),
    *("recomputed", "TTFT ms", "speedup", "Pareto"),
)


@dataclass(frozen=True, kw_only=True)
class QualityOptions(Options):
    """What is measured."""

    runs: tuple[str, ...] = option(
        (),
        "Modes, each with how much it recomputes: reuse, epic:16, union:5% …",
        group=RUNS,
        setting=False,
        metavar="a,b:AMOUNT,c",
    )
    max_tokens: int = option(20, "Longest answer in tokens.", group=RUNS, setting=False, lowest=1)
    force: bool = option(False, "Measure although the gate refuses.", group=RUNS, setting=False)
    defer: bool = option(False, "Calibrate deferred loading instead.", group=RUNS, setting=False)


def quality(desk: Desk) -> Findings:
    """Answer questions in every mode beside full recompute: how near each comes, how fast, and how sure that is."""
    own = desk.get(QualityOptions)
    if own.defer:
        from kvtool.lab.reports.defer import calibrate

        return calibrate(desk)
    requests = desk.get(BatchOptions).requests("quality")
    options = desk.query_options(*_ASKED, max_tokens=own.max_tokens, force=own.force)
    from kvtool.lab.charts.quality import quality_sections
    from kvtool.lab.measure.evaluation import evaluation_facts
    from kvtool.lab.measure.journal import Journal
    from kvtool.lab.measure.quality import overview, quality_rows
    from kvtool.lab.measure.runs import parse_runs

    specs = {spec.name: spec for spec in parse_runs(own.runs)}
    journal = Journal(desk.get(ResumeOptions).resume, evaluation_facts(desk.store, desk.identity, requests, options))
    rows_of = partial(quality_rows, specs=specs, options=options, warn=desk.events.warn)
    failed = measure(desk, requests, specs, journal, rows_of)
    value = {"resolved": {"model": desk.identity.model}, "max_tokens": own.max_tokens, "failed": failed}
    value |= overview(journal.rows)
    sections, code = quality_sections(value), exit_code(failed, journal)
    return Findings("Fusion quality", value, [*_told(value)], sections, read_at(value), code)


def measure(
    desk: Desk,
    requests: list[Request],
    specs: Mapping[str, RunSpec],
    journal: Journal,
    rows_of: Callable[[Session], RowsOf],
) -> int:
    """Work off what the journal has not yet of the first `--limit` questions, and return how many failed.

    Raises
    ------
    GateError : the gate refuses the model.
    """
    from kvtool.lab.measure.evaluation import Evaluation

    def begin() -> RowsOf:
        if specs and not desk.get(QualityOptions).force:
            desk.session.check_gate()
        return rows_of(desk.session)

    limit = desk.get(BatchOptions).limit
    evaluation = Evaluation(requests[:limit], list(specs), journal, desk.events)
    return evaluation.work_off(begin)


def exit_code(failed: int, journal: Journal) -> int:
    """How it went, where so many questions failed."""
    return 0 if not failed else EXIT_PARTIAL if journal.rows else EXIT_FAILED


def read_at(value: Mapping[str, Any]) -> str:
    """Of a report's title: what a lossy level rounds away is part of what it measures."""
    return f"chunks read at level {', '.join(value['levels'])}" if value["levels"] else "no chunk read"


def _told(value: Mapping[str, Any]) -> Iterator[str | Table]:
    yield Table(_HEAD, tuple(_row(row) for row in value["runs"]))
    yield f"{value['questions']} questions, {read_at(value)}; in brackets the 95 % interval over questions"
    if value["with_holes"]:
        yield f"{value['with_holes']} of them lacked chunks of the store: what they say of reuse is too good"


def _row(row: Mapping[str, Any]) -> tuple[object, ...]:
    from kvtool.lab.charts.quality import with_interval

    return (
        row["run"],
        row["count"],
        *(with_interval(dict(row), name) for name in ("f1", "f1_ratio", "contains", "kl_first", "kl_answer")),
        f"{row['answer_equal']:.1%}",
        f"{row['recomputed_share']:.1%}",
        f"{row['ttft_ms_median']:.0f}",
        f"{row['speedup']:.2f}x",
        "*" if row["pareto"] else "",
    )


REPORT = Report(
    quality,
    takes=(BatchOptions, ResumeOptions, QualityOptions, QueryOptions.some(*_ASKED, "defer_first"), ModelOptions),
    examples=(
        "inspect quality --batch questions.jsonl --runs reuse,union:5%,union:15% --resume results.jsonl",
        "inspect quality --batch questions.jsonl --defer --runs union",
    ),
)
