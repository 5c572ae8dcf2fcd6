"""`kvtool inspect quality`: fusion modes and ratios over a question file, next to full recompute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.core.common.sizes import counted
from kvtool.core.errors import EXIT_FAILED, EXIT_PARTIAL
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.core.model.options import ModelOptions
from kvtool.core.options.option import Options, option
from kvtool.core.query.options import QueryOptions
from kvtool.reports.charts import Line, Panel, line_charts
from kvtool.reports.page import Section, Table
from kvtool.reports.report import (
    NO_CONTEXT,
    RETRIEVAL,
    BatchOptions,
    Report,
    ReportContext,
    ReportResult,
    ResumeOptions,
    Shown,
)

if TYPE_CHECKING:
    from kvtool.core.query.reply import Request
    from kvtool.reports.evaluation import RowsOf
    from kvtool.reports.paired_run import RunSpec
    from kvtool.reports.summary import Rows

ASKED = (*RETRIEVAL, "level")
_AGREEMENT = ("top1_agrees", "answer_equal")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options, settings=False, group="Runs"):
    """Runs of an evaluation, and the evidence about them."""

    runs: tuple[str, ...] = option(
        (), "Modes, each with how much it recomputes: reuse, epic:16, union:5% …", metavar="a,b:AMOUNT,c"
    )
    max_tokens: int = option(20, "Maximum length of an answer, in tokens.", lowest=1)
    force: bool = option(False, "Measure even if this model failed the self-check.")
    no_context: bool = option(False, "Also answer without chunks, and report what share of the gap a run recovers.")
    holdout: bool = option(False, "Choose a run on the first half of the questions, and report it on the second.")
    max_kl: float = option(
        0.05, "Maximum KL divergence of a mode that is recommended, in nats per token.", metavar="NATS", lowest=0
    )


def quality(context: ReportContext) -> ReportResult:
    """Answer questions in every mode and by full recompute. Report quality and speed, with intervals."""
    batch = context.get(BatchOptions)
    requests = batch.requests("quality")
    from kvtool.reports.paired_run import parse_runs

    value, _, exit_code = compare_runs(context, requests, parse_runs(context.get(RunOptions).runs))
    sections = quality_sections(value, f"{context.identity.model}, {batch.set_name}")
    return ReportResult("Fusion quality", value, [*_summary(value)], sections, read_at(value), exit_code)


def compare_runs(
    context: ReportContext, requests: Sequence[Request], specs: Sequence[RunSpec]
) -> tuple[dict[str, Any], Rows, int]:
    """Answer the first `--limit` questions in full and by each run, unless the `--resume` file has the answers.

    Returns
    -------
    The JSON of `inspect quality`; the rows of every question that was ever finished; the exit code.

    Raises
    ------
    GateError : the gate refuses the model.
    """
    from kvtool.reports.evaluation import Evaluation, Journal, evaluation_facts
    from kvtool.reports.paired_run import RunSpec, parse_run, quality_rows
    from kvtool.reports.summary import holdout, overview

    flags, identity = context.get(RunOptions), context.identity
    options = context.query_options(*ASKED, max_tokens=flags.max_tokens, force=flags.force)
    identity.check_movable("a comparison of fusion modes")
    by_name = {spec.name: spec for spec in (*([RunSpec(NO_CONTEXT)] if flags.no_context else []), *specs)}
    facts = evaluation_facts(context.store, identity, requests, options)
    journal = Journal(context.get(ResumeOptions).resume, facts, "kvtool inspect quality")

    def begin() -> RowsOf:
        if by_name and not flags.force:
            context.session.check_gate()
        return quality_rows(context.session, by_name, options, context.events.warn)

    asked = requests[: context.get(BatchOptions).limit]
    failed = Evaluation(asked, list(by_name), journal, context.events).work_off(begin)
    base = specs[0] if flags.runs and specs else parse_run(QueryOptions().mode())  # with which others' KL is compared
    value = {"resolved": {"model": identity.model}, "max_tokens": flags.max_tokens, "failed": failed}
    value |= overview(journal.rows, base.name)
    if flags.holdout:
        value["holdout"] = holdout(journal.rows, flags.max_kl)
    return value, journal.rows, 0 if not failed else EXIT_PARTIAL if journal.rows else EXIT_FAILED


def read_at(value: Mapping[str, Any]) -> str:
    """Name the levels that were read: what a lossy level rounds away is part of what is measured."""
    return f"chunks read at level {', '.join(value['levels'])}" if value["levels"] else "no chunk read"


# ---- for people ----


def _summary(value: Mapping[str, Any]) -> Iterator[Shown]:
    yield _runs_table(value)
    yield f"{counted(value['questions'], 'question')}, {read_at(value)}; in brackets the 95 % interval over questions"
    for section in _evidence(value):
        yield from section.tables
        yield from section.text
    if "holdout" in value and not value["holdout"]:
        yield "--holdout needs two questions at least"
    if value["incomplete"]:
        yield f"{value['incomplete']} of them lacked chunks of the store: what they say of reuse is too good"


def quality_sections(value: Mapping[str, Any], about: str) -> Iterator[Section]:
    """Make a page's sections from the JSON of `inspect quality`; `about`: model and questions, for the figure."""
    text = (
        "KL: how far a run's distributions are from full recompute's, in nats, before the first token and mean over "
        "the full answer; in brackets the 95 % interval over questions. Pareto: no other run recomputes less and is "
        "nearer to full."
    )
    yield Section("Distance against recompute", (text,), _figures(value, about))
    yield Section("All runs", tables=(_runs_table(value),))
    yield from _evidence(value)


def _evidence(value: Mapping[str, Any]) -> Iterator[Section]:
    if len(value["runs"]) > 1:
        yield Section("Question by question", (_paired_text(value),), tables=(paired_table(value),))
    if value.get("holdout"):
        yield Section(
            "Chosen on one half", (_holdout_text(value["holdout"]),), tables=(_holdout_table(value["holdout"]),)
        )


# ---- the figure ----


def _figures(value: Mapping[str, Any], about: str) -> tuple[str, ...]:
    """Draw KL and F1 against what is recomputed, if any run reuses; F1 of full and of no context are lines across."""
    found = {row["run"]: row for row in value["runs"]}
    runs = [row for name, row in found.items() if name not in (REFERENCE, NO_CONTEXT)]
    if not runs:
        return ()
    levels = ((REFERENCE, "full"), (NO_CONTEXT, "no context"))
    scores = tuple((label, found[run]["f1"]) for run, label in levels if "f1" in found.get(run, {}))
    panels = [
        Panel(title, tuple(_by_variant(runs, name)), levels=across)
        for title, name, across in (("KL of the answer, nats", "kl_answer", ()), ("F1", "f1", scores))
        if any(name in row for row in runs)
    ]
    note = f"with 95 % intervals over {counted(value['questions'], 'question')}; hollow: a variant of the mode"
    title = f"Modes by how much they recompute: {about}"
    return (line_charts(title, panels, "% of the cached tokens recomputed", note, "linear"),)


def _by_variant(runs: Sequence[Mapping[str, Any]], name: str) -> Iterator[Line]:
    """Yield the points of each mode, ascending, and of each of its variants.

    Shares are rounded, so that modes with the same ratio have the same place.
    """
    found: dict[str, dict[float, Mapping[str, Any]]] = {}
    for row in runs:
        if name in row:
            found.setdefault(row["run"].partition(":")[0], {})[round(100 * row["recomputed_share"])] = row
    for variant, of_share in found.items():
        mode, *changes = variant.split("+")
        rows = sorted(of_share.items())
        points = tuple((share, row[name]) for share, row in rows)
        bounds = tuple(tuple(row["intervals"][name] or (row[name],) * 2) for _, row in rows)
        label = ", ".join([mode, *(f"no {change[:-3]}" if change.endswith("=no") else change for change in changes)])
        yield Line(label, points, bounds, mode if changes else "")


# ---- tables ----


def _runs_table(value: Mapping[str, Any]) -> Table:
    head = (
        *("run", "n", "F1", "of full", "contains", "KL first", "KL answer", "same first", "same answer"),
        *("recomputed", "TTFT ms", "speedup", "Pareto"),
    )
    rows = (
        (
            row["run"],
            row["count"],
            *(with_interval(row, name) for name in ("f1", "f1_ratio", "contains", "kl_first", "kl_answer")),
            *(_percent(row, name) for name in _AGREEMENT),
            "-" if row["run"] == NO_CONTEXT else _percent(row, "recomputed_share"),
            f"{row['ttft_ms_median']:.0f}",
            f"{row['speedup']:.2f}x",
            "*" if row["pareto"] else "",
        )
        for row in value["runs"]
    )
    return Table(head, tuple(rows))


def _percent(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name]:.1%}" if name in row else "-"


def with_interval(row: Mapping[str, Any], name: str, sign: str = "") -> str:
    """Format a run's number with its interval, or a dash. `sign`: `+` writes that of a number above 0, too."""
    if row.get(name) is None:
        return "-"
    if row["intervals"][name] is None:
        return f"{row[name]:{sign}.3f} (n = 1)"
    low, high = row["intervals"][name]
    return f"{row[name]:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def paired_table(value: Mapping[str, Any]) -> Table:
    """Compare each run with full prefill, no context and another run, question by question; without empty columns."""
    runs = [row for row in value["runs"] if row["run"] != REFERENCE]
    base = value["kl_base"]
    numbers = (
        *(("F1 - full", "f1_difference", "+"), ("contains - full", "contains_difference", "+")),
        *(("PGR of F1", "pgr_f1", ""), ("PGR of contains", "pgr_contains", "")),
        *((f"KL answer - {base}", "kl_answer_difference", "+"), (f"KL first - {base}", "kl_first_difference", "+")),
    )
    columns = [(head, [with_interval(row, name, sign) for row in runs]) for head, name, sign in numbers]
    columns += [
        (f"full {which}: n, F1, contains", [_scores(row.get(f"full_{which}")) for row in runs])
        for which in ("right", "wrong")
    ]
    known = [(head, cells) for head, cells in columns if set(cells) - {"-"}]
    names = [row["run"] for row in runs]
    return Table(("run", *(head for head, _ in known)), tuple(zip(names, *(cells for _, cells in known), strict=True)))


def _scores(some: Mapping[str, Any] | None) -> str:
    if not some:
        return "-"
    return ", ".join([str(some["count"]), *(f"{some[name]:.3f}" for name in ("f1", "contains") if name in some)])


def _paired_text(value: Mapping[str, Any]) -> str:
    return (
        f"Paired by question, {value['resamples']:,} resamples. PGR: the share of the gap between no context and full "
        "that a run recovers (KVShareArena, arXiv 2609.10266), for which --no-context is needed; a dash: the gap is "
        "not above 0 in 95 % of the resamples. Full right, full wrong: the questions that full prefill's answer "
        "contains a gold answer to, and the others (BoxOffice, arXiv 2609.31415): n, F1, contains."
    )


def _holdout_table(chosen: Mapping[str, Any]) -> Table:
    head = (
        *("rule", "run", "half", "n", "recomputed", "KL answer", "KL first", "F1 - full", "contains - full"),
        *("same first", "same answer"),
    )
    rows: list[tuple[object, ...]] = []
    for rule in chosen["rules"]:
        if rule["run"] is None:
            rows.append((rule["rule"], "none does", *("-",) * (len(head) - 2)))
            continue
        rows += [
            (
                *(rule["rule"], rule["run"], half, row["count"], _percent(row, "recomputed_share")),
                *(with_interval(row, name) for name in ("kl_answer", "kl_first")),
                *(with_interval(row, name, "+") for name in ("f1_difference", "contains_difference")),
                *(_percent(row, name) for name in _AGREEMENT),
            )
            for half, row in (("first, chosen on", rule["selection"]), ("second", rule["held_out"]))
        ]
    return Table(head, tuple(rows))


def _holdout_text(chosen: Mapping[str, Any]) -> str:
    left_out = f" Not weighed, since some questions lack them: {', '.join(chosen['excluded'])}."
    return (
        "Chosen on the first half of the questions in the file's order. nearest: the lowest mean KL of the answer "
        f"among the runs that recompute at most {chosen['max_recomputed']:.0%} of the cached tokens, in whole "
        "percents. cheapest: the least recompute among the runs whose KL of the answer is at most "
        f"{chosen['max_kl']:g} nats by the upper end of its 95 % interval." + (left_out if chosen["excluded"] else "")
    )


REPORT = Report(
    quality,
    takes=(BatchOptions, ResumeOptions, RunOptions, QueryOptions.some(*ASKED), ModelOptions),
    examples=(
        "inspect quality --batch q.jsonl --runs reuse,union:5% --resume r.jsonl",
        "inspect quality --batch questions.jsonl --no-context --holdout",
    ),
)
