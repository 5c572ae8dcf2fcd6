"""Forecast of a question: what its prompt would find in the cache, and each mode's time; runs no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.core.fusion.cost import PromptRows, Speeds
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors import MODES, REFERENCE, WEIGHED, selector_for
from kvtool.core.query.answer import reply_chunks
from kvtool.core.query.auto import spans_of
from kvtool.core.query.prompt import PromptLayout

if TYPE_CHECKING:
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.session.session import Session


def plan_facts(session: Session, asked: PromptLayout, options: QueryOptions, speeds: Speeds | None) -> dict[str, Any]:
    """Work out what `inspect plan` tells of one prompt, as JSON values.

    Parameters
    ----------
    speeds : of this machine; None: no times are told.

    Returns
    -------
    `chunks[{id, source, start, end, line, score, keywords, tokens, status, level[, reason], bytes[, round]}]` (`round`:
    the one of a deferred query that would load it, if it came to that), `cut` (chunks found beside these),
    `tokens{prompt, reused, fresh, exact, miss, dropped}`, `expected_ms` by mode, `break_even{ingest_ms, saved_ms,
    reuses, bytes}`: how many such questions pay for the prefill of these chunks, by `union`'s saving; the last two None
    without speeds.
    """
    plan, chunks = asked.plan, _chunks(session, asked)
    if options.defer:
        for number, (start, stop) in enumerate(options.rounds(len(chunks)), 1):
            for chunk in chunks[start:stop]:
                chunk["round"] = number
    value: dict[str, Any] = {"chunks": chunks, "cut": asked.cut, "tokens": _tokens(plan)}
    if speeds is None or {segment.source.level for segment in plan.cached} - set(speeds.loads):
        return value | {"expected_ms": None, "break_even": None}
    expected = expected_ms(session, plan, speeds, options)
    lead_in, lengths = len(session.identity.lead_in.ids), [len(segment.ids) for segment in plan.chunks]
    ingest = sum(1e3 * speeds.passes.seconds(length, _seen(lead_in, length)) for length in lengths)
    return value | {"expected_ms": expected, "break_even": _break_even(ingest, expected, chunks)}


def _chunks(session: Session, asked: PromptLayout) -> list[dict[str, Any]]:
    """Tell of each chunk what a reply would, and what is stored of it."""
    rows = []
    for hit, segment, chunk in zip(
        asked.hits, asked.plan.chunks, reply_chunks(session, asked, asked.plan), strict=True
    ):
        level, sizes = segment.source.level, session.store.level_sizes(segment.source.chunk_id)
        stored = {"level": level, "bytes": sizes.get(level or "", 0)}
        rows.append(
            chunk.to_json() | {"keywords": session.finder.keywords(hit.passage, asked.request.question)} | stored
        )
    return rows


def _tokens(plan: Plan) -> dict[str, int]:
    """Count tokens before a mode recomputes any: `prompt = reused + fresh`, reused with `exact`, fresh with `miss`;
    those whose rows are not stored are in none of these but in `dropped`."""
    exact, hit, miss, fresh = (
        sum(len(segment.source.rows) for segment in plan.segments if segment.status == status)
        for status in ("exact", "hit", "miss", "fresh")
    )
    return {
        "prompt": exact + hit + miss + fresh,
        "reused": exact + hit,
        "fresh": miss + fresh,
        "exact": exact,
        "miss": miss,
        "dropped": plan.length - (exact + hit + miss + fresh),
    }


def _break_even(
    ingest_ms: float, expected: Mapping[str, float], chunks: Sequence[Mapping[str, Any]]
) -> dict[str, float | None]:
    saved = expected[REFERENCE] - expected[WEIGHED]
    return {
        "ingest_ms": ingest_ms,
        "saved_ms": saved,
        "reuses": ingest_ms / saved if saved > 0 else None,
        "bytes": sum(int(chunk["bytes"]) for chunk in chunks),
    }


def expected_ms(session: Session, plan: Plan, speeds: Speeds, options: QueryOptions) -> dict[str, float]:
    """Expect the TTFT of every mode, without retrieval, from the speeds that the controller decides by, and from what
    it counts as read."""
    selectors = {mode: selector_for(options, mode) for mode in MODES}
    prompt = PromptRows(spans_of(session, plan, [*selectors.values()]), speeds)
    return {mode: 1e3 * selector.expected_seconds(prompt) for mode, selector in selectors.items()}


def _seen(before: int, tokens: int) -> int:
    """Count the keys that so many rows see behind so many others."""
    return tokens * before + tokens * (tokens + 1) // 2
