"""`kvtool inspect plan`: what a question would find in the cache, and what that is worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvtool.cli.inspect_subject import Subject, options_of
from kvtool.cli.options import Run
from kvtool.cli.sessions import unloaded_session
from kvtool.core.errors import UsageError
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions


def plan(run: Run, store: Any, about: Subject) -> None:
    """Lay the prompt out and tell what of it is cached; the model is not loaded."""
    if about.batch is not None:
        raise UsageError("inspect plan takes one question", 'kvtool inspect plan "Who founded the observatory?"')
    (request,) = about.requests("plan")
    from kvtool.core.model.load import resolve_device
    from kvtool.core.query.layout import lay_out
    from kvtool.core.session.speeds import recalled
    from kvtool.lab.measure.plan import plan_report

    options = replace(options_of(run), defer=about.defer or run.get(QueryOptions).defer)
    session = unloaded_session(run, store)
    identity, layers = session.identity, session.layers
    asked = lay_out(session, request, options)
    device = resolve_device(run.get(ModelOptions).device)
    speeds = recalled(store, identity.fingerprint, device, identity.dtype, layers)
    value = {"question": request.question, "resolved": {"model": identity.model, "device": device}}
    value |= plan_report(session, asked, options, speeds)
    if about.wanted:
        _page(run, about, value)
    run.out.result(value, human=lambda: _show(run, value))


def _page(run: Run, about: Subject, value: dict[str, Any]) -> None:
    from kvtool.lab.charts.page import Section, Table

    head = ("id", "source", "line", "score", "keywords", "tokens", "status", "level", "reason", "bytes")
    chunks = Table(head, tuple(tuple(chunk.get(name, "") for name in head) for chunk in value["chunks"]))
    sections = [Section("Chunks", tables=(chunks,))]
    if value["expected_ms"] is not None:
        times = Table(("mode", "expected ms"), tuple((m, f"{ms:.0f}") for m, ms in value["expected_ms"].items()))
        sections.append(Section("Expected time to the first token", tables=(times,)))
    facts = {"question": value["question"]} | value["resolved"] | value["tokens"]
    about.write_page(run, "Plan", facts, sections)


def _show(run: Run, value: dict[str, Any]) -> None:
    from kvtool.lab.measure.plan import reasons

    rows = [
        (
            chunk["id"][:12],
            chunk["source"] if chunk["line"] is None else f"{chunk['source']}:{chunk['line']}",
            "-" if chunk["score"] is None else f"{chunk['score']:.2f}",
            chunk["tokens"],
            chunk["status"],
            chunk["level"] or "-",
            chunk.get("reason") or ", ".join(chunk["keywords"]),
        )
        for chunk in value["chunks"]
    ]
    run.out.table(("chunk", "source", "score", "tokens", "status", "level", "keywords, or why"), rows)
    tokens = value["tokens"]
    run.out.print(
        f"prompt   {tokens['prompt']} tokens: {tokens['reused']} reused ({tokens['exact']} exact), "
        f"{tokens['fresh']} fresh ({tokens['miss']} missed)"
    )
    if rounds := [chunk["round"] for chunk in value["chunks"] if "round" in chunk]:
        first = [chunk for chunk in value["chunks"] if chunk["round"] == 1]
        size = sum(chunk["bytes"] for chunk in first) / 1e6
        run.out.print(
            f"deferred {len(first)} chunk(s) first, {size:.1f} MB; up to {len(rounds) - len(first)} more in "
            f"{max(rounds) - 1} round(s) while the answer is unsure"
        )
    for reason, count in reasons(value["chunks"]).items():
        run.out.print(f"missed   {count} chunk(s): {reason}")
    if value["expected_ms"] is None:
        run.out.print("times    unknown: this machine has not been measured at this level (kvtool query --fusion auto)")
        return
    told = ", ".join(f"{name} {ms:.0f} ms" for name, ms in value["expected_ms"].items())
    run.out.print(f"expected {told}")
    even = value["break_even"]
    if even["reuses"] is None:
        run.out.print("worth    nothing: full prefill is expected to be as fast")
    else:
        run.out.print(
            f"worth    prefilling these chunks takes {even['ingest_ms']:.0f} ms and {even['bytes'] / 1e6:.1f} MB; "
            f"union saves {even['saved_ms']:.0f} ms a question: paid back after {even['reuses']:.1f}"
        )
