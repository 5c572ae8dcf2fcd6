"""`kvtool inspect deviation`: distance of reused KV from full prefill's, by layer and by token."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.reports.page import Shown, Table, sparkline
from kvtool.reports.report import RETRIEVAL, BatchOptions, Report, ReportContext, ReportResult

if TYPE_CHECKING:
    from kvtool.core.query.prompt import PromptLayout

_CHOICES = {"hkvd": "highest deviation", "random": "at random", "first": "first of each chunk"}


def deviation(context: ReportContext) -> ReportResult:
    """Compare a prompt's reused keys and values with full prefill's, by layer and by token."""
    requests, options = context.questions("deviation"), context.query_options(*RETRIEVAL, "level")
    from kvtool.reports.kv_deviation import deviation_report
    from kvtool.reports.reused_prompt import ReusedPrompt, lay_out_exactly

    context.identity.check_movable("inspect deviation")
    prompts = lay_out_exactly(context.session, requests, options)
    reports: list[dict[str, Any]] = []
    chunks: list[dict[str, Any]] = []
    context.events.step("prompts", len(requests), "prompts")
    for asked in prompts.asked:
        report = deviation_report(ReusedPrompt.of(context.session.decoder, asked.plan, prompts.source))
        worth = report.pop("token_deviation")
        chunks = chunks or [*_chunks(asked, worth, context.session.tokenizer)]
        reports.append(report)
        context.events.advance(1)
    value = prompts.facts | {"prompts": len(reports)} | mean_of(reports) | {"chunks": chunks}
    return ReportResult("KV deviation", value, [*_summary(value, prompts.read_at)], _tokens(chunks))


def _chunks(asked: PromptLayout, worth: Sequence[float], tokenizer: Any) -> Iterator[dict[str, Any]]:
    from kvtool.core.model.tokens import whole_characters

    reused = [pair for pair in zip(asked.hits, asked.plan.chunks, strict=True) if pair[1].status == "hit"]
    starts = itertools.accumulate((len(segment.ids) for _, segment in reused), initial=0)
    for (hit, segment), at in zip(reused, starts, strict=False):
        place = hit.passage
        yield {
            **{"id": segment.source.chunk_id.hex(), "source": place.source, "start": place.start, "end": place.end},
            "pieces": [
                {"text": text, "deviation": max(worth[at + start : at + stop])}
                for start, stop, text in whole_characters(tokenizer, segment.ids)
            ],
        }


def mean_of(values: Sequence[Any]) -> Any:
    """Average reports of one form number by number; None is missing, and what is no number is the first report's."""
    first = next((value for value in values if value is not None), None)
    if isinstance(first, bool) or first is None or isinstance(first, str):
        return first
    if isinstance(first, dict):
        return {key: mean_of([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [mean_of(list(items)) for items in zip(*values, strict=True)]
    mean = statistics.fmean(value for value in values if value is not None)
    return int(mean) if all(isinstance(value, int) for value in values) and mean == int(mean) else mean


# ---- for people ----


def _summary(value: Mapping[str, Any], read_at: str) -> Iterator[Shown]:
    layers, attention = value["layers"], value["attention"]
    yield f"KV deviation, {read_at}"
    head = ("layer", "K", "V", "top 5 %", "top 15 %", "rank correlation")
    yield Table(head, tuple(_row(layer) for layer in layers))
    yield "K, V: deviation over size; top: share of the squared V deviation that these tokens hold;"
    yield "rank correlation: of the tokens' V deviation with the next layer's"
    yield f"V by layer           {sparkline([row['v_relative'] for row in layers])}"
    yield f"rank correlation     {sparkline([row['spearman_next'] for row in layers])}"
    ratios, choices = (list(dict.fromkeys(row[name] for row in attention)) for name in ("ratio", "choice"))
    by = {(row["choice"], row["ratio"]): f"{row['deviation']:.3f}" for row in attention}
    yield "deviation of the question's attention:"
    rows = tuple((f"{ratio:.0%}", *(by[choice, ratio] for choice in choices)) for ratio in ratios)
    yield Table(("recomputed", *(_CHOICES[choice] for choice in choices)), rows)


def _row(layer: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        layer["layer"],
        f"{layer['k_relative']:.3f}",
        f"{layer['v_relative']:.3f}",
        f"{layer['top_share']['0.05']:.0%}",
        f"{layer['top_share']['0.15']:.0%}",
        "-" if layer["spearman_next"] is None else f"{layer['spearman_next']:.2f}",
    )


def _tokens(chunks: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    rows = (
        (chunk["source"], chunk["start"], piece["text"], f"{piece['deviation']:.3g}")
        for chunk in chunks
        for piece in chunk["pieces"]
    )
    title = "squared V deviation of each token of the first prompt, as a multiple of the mean token's"
    yield Table(("source", "chunk from", "token", "deviation"), tuple(rows), title)


REPORT = Report(
    deviation,
    takes=(BatchOptions, ChunkChoice, QueryOptions.some(*RETRIEVAL, "level"), ModelOptions),
    about="QUESTION",
    about_help="What is asked; or --batch.",
    examples=(
        'inspect deviation "Who founded the observatory?"',
        'inspect deviation "Who founded the observatory?" --html deviation.html',
    ),
)
