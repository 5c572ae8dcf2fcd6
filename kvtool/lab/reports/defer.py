"""`kvtool inspect quality --defer`: how sure an answer has to be before no more chunks are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.core.errors import UsageError
from kvtool.lab.reports.questions import BatchOptions
from kvtool.lab.reports.report import RETRIEVAL, Desk, Findings
from kvtool.lab.reports.runs import RunOptions, evaluate, read_at

_ASKED = (*RETRIEVAL, "level", "max_loss", "defer_first")


def calibrate(desk: Desk) -> Findings:
    """Answer every question after every round, choose each mode's threshold and keep it beside the store."""
    flags, requests = desk.get(RunOptions), desk.get(BatchOptions).requests("quality")
    options = desk.query_options(*_ASKED, max_tokens=flags.max_tokens, force=flags.force, defer=True)
    from kvtool.lab.charts.defer import bin_table, defer_sections, policy_table
    from kvtool.lab.measure.defer import defer_facts, defer_overview, rows_of_rounds
    from kvtool.lab.measure.runs import parse_runs

    specs = parse_runs(flags.runs or [desk.query_options("fusion").mode()])
    if not specs or len({spec.mode for spec in specs}) < len(specs):
        raise UsageError("--defer calibrates modes that use the cache, each once", "--runs union, or union:5%,reuse")
    if any(not request.answers for request in requests):
        raise UsageError("--defer needs a gold answer to every question", '{"question", "answers"} on every line')
    results = evaluate(desk, requests, specs, options, rows_of_rounds, **defer_facts(options))
    value = {
        "resolved": {"model": desk.identity.model},
        "defer_first": options.defer_first,
        "top_k": options.top_k,
        "failed": results.failed,
        **defer_overview(results.rows),
    }
    _keep(desk, value)
    sections = defer_sections(value) if value["runs"] else ()
    return Findings(
        "Defer", value, [policy_table(value), bin_table(value)], sections, read_at(value), results.exit_code
    )


def _keep(desk: Desk, value: Mapping[str, Any]) -> None:
    from kvtool.core.query.defer import keep_threshold

    for run in value["runs"]:
        facts = {"questions": run["count"], "run": run["run"], "first": value["defer_first"], "top_k": value["top_k"]}
        mode = run["run"].partition(":")[0]
        if not keep_threshold(desk.store, desk.identity.fingerprint, mode, run["threshold"], facts):
            hint = "make the store writable, or make room on its disk"
            desk.events.warn("the thresholds could not be kept", hint)
            return
