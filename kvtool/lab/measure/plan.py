"""What a question's prompt would find in the cache, and how long each mode would take; runs no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtool.core.fusion.cost import PromptRows, Span
from kvtool.core.fusion.plan import Plan
from kvtool.core.fusion.selectors import MODES, REFERENCE, WEIGHED, selector_for
from kvtool.core.fusion.speeds import Speeds
from kvtool.core.query.defer import spans
from kvtool.core.query.layout import Asked, line_of

if TYPE_CHECKING:
    from kvtool.core.query.options import QueryOptions
    from kvtool.core.session.session import Session

_STATUSES = ("exact", "hit", "miss", "fresh")


def plan_report(session: Session, asked: Asked, options: QueryOptions, speeds: Speeds | None) -> dict[str, Any]:
    """What `inspect plan` tells of one prompt, as JSON values.

    Parameters
    ----------
    speeds : of this machine; None: no times are told.

    Returns
    -------
    `chunks[{id, source, start, end, line, score, keywords, tokens, status, level[, reason], bytes[, round]}]` (`round`:
    the one of a deferred query that would load it, if it came to that), `tokens{prompt, reused, fresh, exact, miss}`,
    `expected_ms` by mode, `break_even{ingest_ms, saved_ms, reuses, bytes}`: how many such questions pay for the prefill
    of these chunks, by `union`'s saving; the last two None without speeds.
    """
    plan = asked.plan
    chunks: list[dict[str, Any]] = [
        {
            "id": one.source.chunk_id.hex(),
            "source": hit.passage.source,
            "start": hit.passage.start,
            "end": hit.passage.end,
            "line": line_of(session.store, hit.passage),
            "score": None if hit.score != hit.score else hit.score,
            "keywords": session.finder.keywords(hit.passage),
            "tokens": len(one.ids),
            "status": one.status,
            "level": one.source.level,
            **({"reason": one.reason} if one.status == "miss" else {}),
            "bytes": session.store.level_sizes(one.source.chunk_id).get(one.source.level or "", 0),
        }
        for hit, one in zip(asked.hits, plan.chunks, strict=True)
    ]
    if options.defer:
        for number, (start, stop) in enumerate(spans(len(chunks), options.defer_first), 1):
            for chunk in chunks[start:stop]:
                chunk["round"] = number
    value: dict[str, Any] = {"chunks": chunks, "tokens": _tokens(plan)}
    missing = {one.source.level for one in plan.cached} - set(speeds.loads if speeds else ())
    if speeds is None or missing:
        return value | {"expected_ms": None, "break_even": None}
    expected = expected_ms(plan, speeds, options)
    lead_in = len(session.identity.lead_in.ids)
    ingest = sum(1e3 * speeds.passes.seconds(len(one.ids), _seen(lead_in, len(one.ids))) for one in plan.chunks)
    saved = expected[REFERENCE] - expected[WEIGHED]
    return value | {
        "expected_ms": expected,
        "break_even": {
            "ingest_ms": ingest,
            "saved_ms": saved,
            "reuses": ingest / saved if saved > 0 else None,
            "bytes": sum(int(chunk["bytes"]) for chunk in chunks),
        },
    }


def _tokens(plan: Plan) -> dict[str, int]:
    """`prompt = reused + fresh`, before a mode recomputes anything; `exact` of the reused, `miss` of the fresh ones."""
    counts = {name: sum(len(one.ids) for one in plan.segments if one.status == name) for name in _STATUSES}
    reused, fresh = counts["exact"] + counts["hit"], counts["miss"] + counts["fresh"]
    return {
        "prompt": plan.length,
        "reused": reused,
        "fresh": fresh,
        "exact": counts["exact"],
        "miss": counts["miss"],
    }


def expected_ms(plan: Plan, speeds: Speeds, options: QueryOptions) -> dict[str, float]:
    """TTFT of every mode, retrieval left out, from the speeds that the controller decides by."""
    spans = [Span(len(one.ids), one.status, one.source.level if one.cached else None) for one in plan.segments]
    prompt = PromptRows(spans, speeds)
    return {mode: 1e3 * prompt.seconds(selector_for(options, mode).cost(prompt)) for mode in MODES}


def _seen(before: int, tokens: int) -> int:
    """Keys that so many rows see behind so many others."""
    return tokens * before + tokens * (tokens + 1) // 2


def reasons(chunks: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many chunks would be missed, by reason."""
    found: dict[str, int] = {}
    for chunk in chunks:
        if reason := chunk.get("reason"):
            found[reason] = found.get(reason, 0) + 1
    return found
