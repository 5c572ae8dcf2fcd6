"""`kvtool inspect quality`: fusion modes and ratios over a question file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.cli.inspect_subject import Subject, retrieval_of
from kvtool.cli.sessions import open_session
from kvtool.core.errors import EXIT_FAILED, EXIT_PARTIAL, UsageError
from kvtool.core.query.options import QueryOptions

if TYPE_CHECKING:
    from kvtool.cli.options import Run
    from kvtool.core.cache.store import Store
    from kvtool.core.query.reply import Request
    from kvtool.lab.measure.journal import Journal
    from kvtool.lab.measure.runs import RunSpec

MAX_TOKENS = 20  # of an answer: what is asked for in a question file is short


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the flags ask for."""

    about: Subject
    runs: Sequence[str]
    max_tokens: int
    resume: Path | None
    force: bool = False


def quality(run: Run, store: Store, wanted: Wanted) -> int | None:
    """Measure what is not in the `--resume` file yet; then sum up all that is."""
    from kvtool.core.session.identity import store_identity
    from kvtool.lab.charts.quality import quality_sections
    from kvtool.lab.measure.journal import Journal
    from kvtool.lab.measure.quality import evaluate, evaluation_facts, overview
    from kvtool.lab.measure.runs import parse_runs

    requests, limit = batch_of(wanted.about), wanted.about.limit
    specs, options = parse_runs(wanted.runs), options_for(run, wanted)
    identity = store_identity(store)
    journal = Journal(wanted.resume, evaluation_facts(store, identity, requests, options))
    failed = measure(run, store, requests[:limit], specs, options, journal, evaluate)
    facts = {"max_tokens": options.max_tokens, "failed": failed}
    value = {"resolved": {"model": identity.model}} | facts | overview(journal.rows)
    if value["runs"]:
        wanted.about.write_page(
            run,
            "Fusion quality",
            {"model": identity.model} | facts | {"questions": value["questions"]},
            quality_sections(value),
            read_at(value),
        )
    run.out.result(value, human=lambda: _show(run, value))
    if not failed:
        return None
    return EXIT_PARTIAL if journal.rows else EXIT_FAILED


def batch_of(about: Subject) -> list[Request]:
    """All questions of the file. Raises UsageError."""
    from kvtool.core.query.reply import read_batch

    if about.batch is None:
        raise UsageError("inspect quality needs questions", "--batch FILE.jsonl, as for `kvtool query`")
    return read_batch(about.batch)


def options_for(run: Run, wanted: Wanted) -> QueryOptions:
    """What all runs have in common."""
    given = run.get(QueryOptions)
    return QueryOptions(
        **retrieval_of(run),
        level=given.level,
        max_loss=given.max_loss,
        max_tokens=wanted.max_tokens,
        force=wanted.force,
    )


def measure(
    run: Run,
    store: Store,
    requests: Sequence[Request],
    specs: Sequence[RunSpec],
    options: QueryOptions,
    journal: Journal,
    evaluate: Callable[..., int],
) -> int:
    """Returns how many questions failed. The model is loaded, and the file held, only if something is missing."""
    from kvtool.lab.measure.quality import open_work

    if not open_work(requests, specs, journal.rows):
        return 0
    out = run.out
    with journal.writing():
        work = open_work(requests, specs, journal.rows)
        session = open_session(run, store)
        with out.progress("questions", total=len(work), unit="questions") as bar:
            return evaluate(session, requests, work, options, journal, out.warning, bar.advance)


def read_at(value: dict[str, Any]) -> str:
    """Of a report's title: what a lossy level rounds away is part of what it measures."""
    return f"chunks read at level {', '.join(value['levels'])}" if value["levels"] else "no chunk read"


def _show(run: Run, value: dict[str, Any]) -> None:
    from kvtool.lab.charts.quality import with_interval

    head = (
        *("run", "n", "F1", "of full", "contains", "KL first", "KL answer", "same answer"),
        *("recomputed", "TTFT ms", "speedup", "Pareto"),
    )
    rows = [
        (
            row["run"],
            row["count"],
            with_interval(row, "f1"),
            with_interval(row, "f1_ratio"),
            with_interval(row, "contains"),
            with_interval(row, "kl_first"),
            with_interval(row, "kl_answer"),
            f"{row['answer_equal']:.1%}",
            f"{row['recomputed_share']:.1%}",
            f"{row['ttft_ms_median']:.0f}",
            f"{row['speedup']:.2f}x",
            "*" if row["pareto"] else "",
        )
        for row in value["runs"]
    ]
    run.out.table(head, rows)
    run.out.print(f"{value['questions']} questions, {read_at(value)}; in brackets the 95 % interval over questions")
    if value["with_holes"]:
        run.out.print(f"{value['with_holes']} of them lacked chunks of the store: what they say of reuse is too good")
