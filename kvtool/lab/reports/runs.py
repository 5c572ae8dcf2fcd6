"""The runs that `kvtool inspect quality` evaluates: their flags, and what they make of a file of questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.core.errors import EXIT_FAILED, EXIT_PARTIAL
from kvtool.core.options.option import Options, option
from kvtool.lab.reports.questions import BatchOptions, ResumeOptions
from kvtool.lab.reports.report import Desk

if TYPE_CHECKING:
    from kvtool.core.evaluate.measures import Row
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.query.reply import Request
    from kvtool.core.session.session import Session
    from kvtool.lab.measure.evaluation import RowsOf
    from kvtool.lab.measure.runs import RunSpec

RUNS = "Runs"  # the heading in the report's help


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options, settings=False, group=RUNS):
    """Options of an evaluation's runs."""

    runs: tuple[str, ...] = option(
        (), "Modes, each with how much it recomputes: reuse, epic:16, union:5% …", metavar="a,b:AMOUNT,c"
    )
    max_tokens: int = option(20, "Maximum length of an answer, in tokens.", lowest=1)
    force: bool = option(False, "Measure even if this model failed the self-check.")


@dataclass(frozen=True, slots=True)
class Results:
    """The rows of every question that was ever finished, and how many questions failed now."""

    rows: Mapping[int, Mapping[str, Row]]
    failed: int

    @property
    def exit_code(self) -> int:
        """The exit code: whether all, some or none of the questions were answered."""
        return 0 if not self.failed else EXIT_PARTIAL if self.rows else EXIT_FAILED


def evaluate(
    desk: Desk,
    requests: Sequence[Request],
    specs: Sequence[RunSpec],
    options: QueryOptions,
    begin: Callable[[Session, Mapping[str, RunSpec], QueryOptions], RowsOf],
    **conditions: Any,
) -> Results:
    """Answer what the `--resume` file has not yet of the first `--limit` questions.

    Parameters
    ----------
    begin : makes what answers a question; called with the model loaded, if there is anything to answer.
    conditions : what results depend on besides `evaluation_facts`.

    Raises
    ------
    GateError : the gate refuses the model.
    """
    from kvtool.lab.measure.evaluation import Evaluation, evaluation_facts
    from kvtool.lab.measure.journal import Journal

    desk.identity.check_movable("a comparison of fusion modes")
    by_name = {spec.name: spec for spec in specs}
    facts = evaluation_facts(desk.store, desk.identity, requests, options) | conditions
    journal = Journal(desk.get(ResumeOptions).resume, facts)

    def gated() -> RowsOf:
        if specs and not options.force:
            desk.session.check_gate()
        return begin(desk.session, by_name, options)

    asked = requests[: desk.get(BatchOptions).limit]
    failed = Evaluation(asked, list(by_name), journal, desk.events).work_off(gated)
    return Results(journal.rows, failed)


def read_at(value: Mapping[str, Any]) -> str:
    """Say in a report's title which levels were read: what a lossy one rounds away is part of what is measured."""
    return f"chunks read at level {', '.join(value['levels'])}" if value["levels"] else "no chunk read"
