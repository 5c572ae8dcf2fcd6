"""`kvtool inspect plan`: forecast of a question: cached chunks of its prompt, and each mode's time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvtool.core.common.marks import Place, as_named_here
from kvtool.core.common.text import counted
from kvtool.core.fusion.options import FusionOptions, selector_for
from kvtool.core.fusion.selectors import MODES
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.reports.report import RETRIEVAL, Report, ReportContext, ReportResult, Shown, Table

if TYPE_CHECKING:
    from kvtool.core.fusion.plan import Plan, Speeds
    from kvtool.core.query.prompt import PromptLayout
    from kvtool.core.session.session import Session

_ASKED = (*RETRIEVAL, "level", "ratio", "link_tokens")

_WITHOUT_WORDS = "no word: by its title or by vectors"


def plan(context: ReportContext) -> ReportResult:
    """Show which parts of a question's prompt are cached, and the expected time of each mode. Runs no model."""
    request, options = context.question("plan"), context.query_options(*_ASKED)
    from kvtool.core.checkpoint.load import resolve_device
    from kvtool.core.query.prompt import lay_out
    from kvtool.core.session.speeds import recalled

    session, device = context.session, resolve_device(context.get(ModelOptions).device)
    identity = session.identity
    identity.check_movable("inspect plan")
    asked = lay_out(session, request, options)
    speeds = recalled(session.store, identity.fingerprint, device, session.model.arithmetic.dtype, session.layers)
    value = {"question": request.question, "resolved": {"model": identity.model, "device": device}}
    value |= plan_facts(session, asked, options, speeds)
    return ReportResult("Plan", value, [*_summary(value)])


def plan_facts(session: Session, asked: PromptLayout, options: QueryOptions, speeds: Speeds | None) -> dict[str, Any]:
    plan = asked.plan
    value = {"chunks": _chunk_rows(session, asked), "chunks_omitted": asked.cut, "tokens": _tokens(plan)}
    if speeds is None or {segment.source.level for segment in plan.cached} - set(speeds.loads):
        return value | {"expected_ms": None}
    return value | {"expected_ms": expected_ms(session, plan, speeds, options)}


def _chunk_rows(session: Session, asked: PromptLayout) -> list[dict[str, Any]]:
    from kvtool.core.query.answer import reply_chunks

    rows = []
    for hit, segment, chunk in zip(
        asked.hits, asked.plan.chunks, reply_chunks(session, asked, asked.plan), strict=True
    ):
        source = segment.source
        row = {
            "keywords": session.finder.keywords(hit.passage, asked.request.question),
            "level": source.level,
            "bytes": session.store.level_sizes(source.chunk_id).get(source.level or "", 0),
        }
        rows.append(chunk.to_json() | row)
    return rows


def _tokens(plan: Plan) -> dict[str, int]:
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


def expected_ms(session: Session, plan: Plan, speeds: Speeds, options: FusionOptions) -> dict[str, float]:
    from kvtool.core.fusion.plan import PromptRows
    from kvtool.core.query.auto import spans_of

    selectors = {mode: selector_for(options, mode) for mode in MODES}
    prompt = PromptRows(spans_of(session, plan), speeds)
    return {mode: 1e3 * selector.expected_seconds(prompt) for mode, selector in selectors.items()}


# ---- for people ----


def _summary(value: Mapping[str, Any]) -> Iterator[Shown]:
    chunks, tokens = value["chunks"], value["tokens"]
    head = ("chunk", "source", "score", "tokens", "status", "level", "matched, or why")
    yield Table(head, tuple(map(_row, chunks)))
    yield (
        f"prompt   {tokens['prompt']} tokens: {tokens['reused']} reused ({tokens['exact']} exact), "
        f"{tokens['fresh']} fresh ({tokens['miss']} missed)"
        + (f"; {tokens['dropped']} more are not stored" if tokens["dropped"] else "")
    )
    for reason, count in Counter(chunk["reason"] for chunk in chunks if "reason" in chunk).items():
        yield f"missed   {counted(count, 'chunk')}: {reason}"
    if value["expected_ms"] is None:
        yield "times    unknown: this machine has not been measured at this level (kvtool query --fusion auto)"
    else:
        yield f"expected {', '.join(f'{name} {ms:.0f} ms' for name, ms in value['expected_ms'].items())}"


def _row(chunk: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        chunk["id"][:12],
        Place(chunk["line"], chunk["label"]).cite(as_named_here(chunk["source"])),
        "-" if chunk["score"] is None else f"{chunk['score']:.2f}",
        chunk["tokens"],
        chunk["status"],
        chunk["level"] or "-",
        chunk.get("reason") or ", ".join(chunk["keywords"]) or ("" if chunk["score"] is None else _WITHOUT_WORDS),
    )


PLAN = Report(
    plan,
    takes=(ChunkChoice, QueryOptions.some(*_ASKED), ModelOptions),
    about="QUESTION",
    about_help="What would be asked.",
    examples=('inspect plan "Who founded the observatory?"', 'inspect plan "Who founded it?" --top-k 8 --level 2'),
)
