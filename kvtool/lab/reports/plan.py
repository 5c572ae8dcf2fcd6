"""`kvtool inspect plan`: what a question would find in the cache, and what that is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kvtool.core.common.marks import Place, as_named_here
from kvtool.core.common.sizes import counted
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.lab.charts.page import Section, Table
from kvtool.lab.reports.questions import one_question
from kvtool.lab.reports.report import RETRIEVAL, Desk, Findings, Report

_ASKED = (*RETRIEVAL, "level", "max_loss", "ratio", "link_tokens", "defer", "defer_first")

_WITHOUT_WORDS = "no word: by its title or by vectors"


def plan(desk: Desk) -> Findings:
    """Show which parts of a question's prompt are cached, and the expected time of each mode. Runs no model."""
    request, options = one_question(desk, "plan"), desk.query_options(*_ASKED)
    from kvtool.core.checkpoint.load import resolve_device
    from kvtool.core.query.prompt import lay_out
    from kvtool.core.session.speeds import recalled
    from kvtool.lab.measure.plan import plan_facts

    session, device = desk.session, resolve_device(desk.get(ModelOptions).device)
    identity = session.identity
    identity.check_movable("inspect plan")
    asked = lay_out(session, request, options)
    speeds = recalled(session.store, identity.fingerprint, device, session.arithmetic.dtype, session.layers)
    value = {"question": request.question, "resolved": {"model": identity.model, "device": device}}
    value |= plan_facts(session, asked, options, speeds)
    return Findings("Plan", value, [*_told(value)], _sections(value))


def _sections(value: Mapping[str, Any]) -> Iterator[Section]:
    yield Section("Chunks", tables=(_chunks(value),))
    if value["expected_ms"] is not None:
        times = Table(("mode", "expected ms"), tuple((m, f"{ms:.0f}") for m, ms in value["expected_ms"].items()))
        yield Section("Expected time to the first token", tables=(times,))


def _told(value: Mapping[str, Any]) -> Iterator[str | Table]:
    chunks, tokens = value["chunks"], value["tokens"]
    yield _chunks(value)
    yield (
        f"prompt   {tokens['prompt']} tokens: {tokens['reused']} reused ({tokens['exact']} exact), "
        f"{tokens['fresh']} fresh ({tokens['miss']} missed)"
        + (f"; {tokens['dropped']} more are not stored" if tokens["dropped"] else "")
    )
    if rounds := [chunk["round"] for chunk in chunks if "round" in chunk]:
        first = [chunk for chunk in chunks if chunk["round"] == 1]
        yield (
            f"deferred {counted(len(first), 'chunk')} first, {sum(chunk['bytes'] for chunk in first) / 1e6:.1f} MB; "
            f"up to {len(rounds) - len(first)} more in {counted(max(rounds) - 1, 'round')} while the answer is unsure"
        )
    for reason, count in Counter(chunk["reason"] for chunk in chunks if "reason" in chunk).items():
        yield f"missed   {counted(count, 'chunk')}: {reason}"
    yield from _told_of_times(value["expected_ms"], value["break_even"])


def _chunks(value: Mapping[str, Any]) -> Table:
    """The prompt's chunks, a row each; the same in a terminal and on the page."""
    head = ("chunk", "source", "score", "tokens", "status", "level", "matched, or why")
    return Table(head, tuple(_row(chunk) for chunk in value["chunks"]))


def _row(chunk: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        chunk["id"][:12],
        Place(chunk["line"], chunk["label"]).behind(as_named_here(chunk["source"])),
        "-" if chunk["score"] is None else f"{chunk['score']:.2f}",
        chunk["tokens"],
        chunk["status"],
        chunk["level"] or "-",
        chunk.get("reason") or ", ".join(chunk["keywords"]) or ("" if chunk["score"] is None else _WITHOUT_WORDS),
    )


def _told_of_times(expected: Mapping[str, float] | None, even: Mapping[str, Any]) -> Iterator[str]:
    if expected is None:
        yield "times    unknown: this machine has not been measured at this level (kvtool query --fusion auto)"
        return
    yield f"expected {', '.join(f'{name} {ms:.0f} ms' for name, ms in expected.items())}"
    if even["reuses"] is None:
        yield "worth    nothing: full prefill is expected to be as fast"
    else:
        yield (
            f"worth    prefilling these chunks takes {even['ingest_ms']:.0f} ms and {even['bytes'] / 1e6:.1f} MB; "
            f"union saves {even['saved_ms']:.0f} ms a question: paid back after {even['reuses']:.1f}"
        )


REPORT = Report(
    plan,
    takes=(ChunkChoice, QueryOptions.some(*_ASKED), ModelOptions),
    about="QUESTION",
    about_help="What would be asked.",
    examples=('inspect plan "Who founded the observatory?"', 'inspect plan "Who founded it?" --top-k 8 --level 2'),
)
