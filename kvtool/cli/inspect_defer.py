"""`kvtool inspect quality --defer`: how sure an answer has to be before no more chunks are loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvtool.cli.inspect_quality import Wanted, batch_of, measure, options_for, read_at
from kvtool.core.errors import EXIT_FAILED, EXIT_PARTIAL, UsageError
from kvtool.core.query.options import QueryOptions

if TYPE_CHECKING:
    from kvtool.cli.options import Run
    from kvtool.core.cache.store import Store


def calibrate(run: Run, store: Store, wanted: Wanted) -> int | None:
    """Answer every question after every round, choose each mode's threshold and keep it beside the store."""
    from kvtool.core.session.identity import store_identity
    from kvtool.lab.charts.defer import defer_sections
    from kvtool.lab.measure.defer import defer_facts, defer_overview, evaluate_rounds
    from kvtool.lab.measure.journal import Journal
    from kvtool.lab.measure.quality import evaluation_facts
    from kvtool.lab.measure.runs import parse_runs

    requests = batch_of(wanted.about)
    specs = parse_runs(wanted.runs or [run.get(QueryOptions).fusion])
    if not specs or len({spec.mode for spec in specs}) < len(specs):
        raise UsageError("--defer calibrates modes that use the cache, each once", "--runs union, or union:5%,reuse")
    if any(not request.answers for request in requests):
        raise UsageError("--defer needs a gold answer to every question", '{"question", "answers"} on every line')
    options = replace(options_for(run, wanted), defer=True, defer_first=run.get(QueryOptions).defer_first)
    identity = store_identity(store)
    facts = evaluation_facts(store, identity, requests, options) | defer_facts(options)
    journal = Journal(wanted.resume, facts)
    failed = measure(run, store, requests[: wanted.about.limit], specs, options, journal, evaluate_rounds)
    told = {"defer_first": options.defer_first, "top_k": options.top_k, "failed": failed}
    value = {"resolved": {"model": identity.model}} | told | defer_overview(journal.rows)
    if value["runs"]:
        _keep(run, store, identity.fingerprint, value)
        facts = {"model": identity.model} | told | {"questions": value["questions"]}
        wanted.about.write_page(run, "Defer", facts, defer_sections(value), read_at(value))
    run.out.result(value, human=lambda: _show(run, value))
    if not failed:
        return None
    return EXIT_PARTIAL if journal.rows else EXIT_FAILED


def _keep(run: Run, store: Store, fingerprint: str, value: dict[str, Any]) -> None:
    from kvtool.core.query.calibration import keep_threshold

    for one in value["runs"]:
        facts = {"questions": one["count"], "run": one["run"], "first": value["defer_first"], "top_k": value["top_k"]}
        if not keep_threshold(store, fingerprint, one["run"].partition(":")[0], one["threshold"], facts):
            run.out.warning("the thresholds could not be kept", "make the store writable, or make room on its disk")
            return


def _show(run: Run, value: dict[str, Any]) -> None:
    from kvtool.lab.charts.defer import policy_rows

    head = ("run", "policy", "threshold", "F1", "contains", "chunks", "rounds", "bytes of all")
    run.out.table(head, [row for one in value["runs"] for row in policy_rows(one)])
    rows = [
        (one["run"], f"{b['low']:.1f}", b["count"], f"{b['contains']:.3f}", f"{b['f1']:.3f}")
        for one in value["runs"]
        for b in one["bins"]
    ]
    run.out.table(("run", "confidence from", "answers", "contain a gold one", "F1"), rows)
