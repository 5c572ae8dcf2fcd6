"""`kvtool inspect quality --defer`: how sure an answer has to be before no more chunks are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from kvtool.core.errors import UsageError
from kvtool.core.query.options import QueryOptions
from kvtool.lab.charts.page import Table
from kvtool.lab.reports.quality import QualityOptions, exit_code, measure, read_at
from kvtool.lab.reports.questions import BatchOptions, ResumeOptions
from kvtool.lab.reports.report import RETRIEVAL, Desk, Findings

_ASKED = (*RETRIEVAL, "level", "max_loss", "defer_first")


def calibrate(desk: Desk) -> Findings:
    """Answer every question after every round, choose each mode's threshold and keep it beside the store."""
    own, requests = desk.get(QualityOptions), desk.get(BatchOptions).requests("quality")
    options = desk.query_options(*_ASKED, max_tokens=own.max_tokens, force=own.force, defer=True)
    from kvtool.lab.charts.defer import defer_sections
    from kvtool.lab.measure.defer import defer_facts, defer_overview, rows_of_rounds
    from kvtool.lab.measure.evaluation import evaluation_facts
    from kvtool.lab.measure.journal import Journal
    from kvtool.lab.measure.runs import parse_runs

    specs = {spec.name: spec for spec in parse_runs(own.runs or [desk.get(QueryOptions).fusion])}
    if not specs or len({spec.mode for spec in specs.values()}) < len(specs):
        raise UsageError("--defer calibrates modes that use the cache, each once", "--runs union, or union:5%,reuse")
    if any(not request.answers for request in requests):
        raise UsageError("--defer needs a gold answer to every question", '{"question", "answers"} on every line')
    conditions = evaluation_facts(desk.store, desk.identity, requests, options) | defer_facts(options)
    journal = Journal(desk.get(ResumeOptions).resume, conditions)
    failed = measure(desk, requests, specs, journal, partial(rows_of_rounds, specs=specs, options=options))
    value = {
        "resolved": {"model": desk.identity.model},
        "defer_first": options.defer_first,
        "top_k": options.top_k,
        "failed": failed,
        **defer_overview(journal.rows),
    }
    _keep(desk, value)
    sections = defer_sections(value) if value["runs"] else ()
    return Findings("Defer", value, [*_told(value)], sections, read_at(value), exit_code(failed, journal))


def _keep(desk: Desk, value: Mapping[str, Any]) -> None:
    from kvtool.core.query.calibration import keep_threshold

    for run in value["runs"]:
        facts = {"questions": run["count"], "run": run["run"], "first": value["defer_first"], "top_k": value["top_k"]}
        mode = run["run"].partition(":")[0]
        if not keep_threshold(desk.store, desk.identity.fingerprint, mode, run["threshold"], facts):
            hint = "make the store writable, or make room on its disk"
            desk.events.warn("the thresholds could not be kept", hint)
            return


def _told(value: Mapping[str, Any]) -> Iterator[Table]:
    from kvtool.lab.charts.defer import policy_rows

    head = ("run", "policy", "threshold", "F1", "contains", "chunks", "rounds", "bytes of all")
    yield Table(head, tuple(row for run in value["runs"] for row in policy_rows(run)))
    rows = [
        (run["run"], f"{b['low']:.1f}", b["count"], f"{b['contains']:.3f}", f"{b['f1']:.3f}")
        for run in value["runs"]
        for b in run["bins"]
    ]
    yield Table(("run", "confidence from", "answers", "contain a gold one", "F1"), tuple(rows))
