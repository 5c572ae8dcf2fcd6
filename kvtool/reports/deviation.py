"""`kvtool inspect deviation`: distance of reused KV from full prefill's, by layer and by token."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.core.codec.levels import lossy
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.reports.charts import Axis, Line, Panel, line_charts, series, sparkline
from kvtool.reports.page import HeatMap, Passage, Section, Table
from kvtool.reports.report import RETRIEVAL, BatchOptions, Report, ReportContext, ReportResult, Shown

if TYPE_CHECKING:
    from kvtool.core.query.prompt import PromptLayout

_CHOICES = {"hkvd": "highest deviation", "random": "at random", "first": "first of each chunk"}
_SHIFT = {"k_before": "keys", "k_after": "keys, shifted", "v_before": "values", "v_after": "values, shifted"}
_RELATIVE = "‖Δ‖ / ‖full‖"


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
    return ReportResult("KV deviation", value, [*_summary(value, prompts.read_at)], _sections(value), prompts.read_at)


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


# ---- on a terminal ----


def _summary(value: Mapping[str, Any], read_at: str) -> Iterator[Shown]:
    layers, attention, shift = value["layers"], value["attention"], value["shift"]
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
    yield f"deviation of {shift['tokens_shifted']:.0f} reused tokens that `union` at {shift['ratio']:.0%} only shifts:"
    rows = tuple((row["layer"], *(f"{row[name]:.3f}" for name in _SHIFT)) for row in shift["layers"])
    yield Table(("layer", "K", "K shifted", "V", "V shifted"), rows)


def _row(layer: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        layer["layer"],
        f"{layer['k_relative']:.3f}",
        f"{layer['v_relative']:.3f}",
        f"{layer['top_share']['0.05']:.0%}",
        f"{layer['top_share']['0.15']:.0%}",
        "-" if layer["spearman_next"] is None else f"{layer['spearman_next']:.2f}",
    )


# ---- on a page ----


def _sections(value: Mapping[str, Any]) -> Iterator[Section]:
    yield _by_layer(value["layers"], value["level"])
    yield _concentration(value["layers"])
    yield _neighbours(value["layers"])
    yield _attention(value["attention"])
    yield _shift(value["shift"])
    if value["chunks"]:
        yield _tokens(value["chunks"])


def _chart(title: str, panel: str, lines: Sequence[Line], x: str = "layer", axis: Axis = "even") -> tuple[str]:
    return (line_charts(title, [Panel(panel, tuple(lines))], x, axis=axis),)


def _by_layer(layers: Sequence[Mapping[str, Any]], level: str) -> Section:
    lines = [series(name, layers, "layer", key) for name, key in (("keys", "k_relative"), ("values", "v_relative"))]
    text = (
        "How far the reused keys and values of the chunks' tokens are from those of a full prefill of the same "
        "prompt, layer by layer. "
    )
    if lossy([level]):
        text += f"They are read at level {level}: what it rounds away is part of the deviation, at every layer."
    else:
        text += "The first layer's depend only on the token, so they do not deviate."
    return Section("By layer", (text,), _chart("Deviation of reused KV from full prefill's", _RELATIVE, lines))


def _concentration(layers: Sequence[Mapping[str, Any]]) -> Section:
    deviating = [row for row in layers if row["v_sse"] > 0] or list(layers)
    chosen = {row["layer"]: row for row in (deviating[0], deviating[len(deviating) // 2], deviating[-1])}
    lines = [
        Line(f"layer {layer}", tuple((100 * float(share), part) for share, part in row["top_share"].items()))
        for layer, row in chosen.items()
    ]
    text = (
        "CacheBlend's first insight: few tokens hold most of the deviation. If it were spread evenly, the top 15 % of "
        "the tokens would hold 15 % of it."
    )
    panel = "share of the squared V deviation"
    return Section(
        "Concentration", (text,), _chart("Concentration", panel, lines, "top % of the tokens", axis="linear")
    )


def _neighbours(layers: Sequence[Mapping[str, Any]]) -> Section:
    known = [row for row in layers if row["spearman_next"] is not None]
    text = (
        "CacheBlend's second insight: tokens that deviate much at one layer do at the next. Spearman's rank "
        "correlation of the tokens' V deviation, each layer with the one after it; 1 is the same order."
    )
    lines = [series("V", known, "layer", "spearman_next")]
    chart = _chart("Rank correlation with the next layer", "Spearman", lines) if known else ()
    return Section("From layer to layer", (text,), chart)


def _attention(rows: Sequence[Mapping[str, Any]]) -> Section:
    percent = [{**row, "percent": 100 * row["ratio"]} for row in rows]
    lines = [
        series(_CHOICES[choice], [row for row in percent if row["choice"] == choice], "percent", "deviation")
        for choice in dict.fromkeys(row["choice"] for row in rows)
    ]
    text = (
        "How far the question's attention over the fused cache is from that over the full one, mean over layers, "
        "when so many of the reused tokens are recomputed: those that deviate most, random ones, the first of each "
        "chunk."
    )
    chart = _chart("Attention deviation", "‖A − A full‖ / ‖A full‖", lines, "% of the tokens recomputed", "linear")
    return Section("Attention against recompute", (text,), chart)


def _shift(shift: Mapping[str, Any]) -> Section:
    lines = [series(name, shift["layers"], "layer", key) for key, name in _SHIFT.items()]
    text = (
        f"`union` recomputes {shift['ratio']:.0%} of the tokens and moves the others by what these changed by, chunk "
        f"by chunk. Of the recomputed tokens' change in values their chunk has {shift['common']:.0%} in common."
    )
    return Section("Shifted reuse", (text,), _chart("Deviation of the rows that stay reused", _RELATIVE, lines))


def _tokens(chunks: Sequence[Mapping[str, Any]]) -> Section:
    passages = tuple(
        Passage(
            f"{number}: {chunk['source']}, characters {chunk['start']} to {chunk['end']}",
            tuple((piece["text"], piece["deviation"]) for piece in chunk["pieces"]),
        )
        for number, chunk in enumerate(chunks, 1)
    )
    text = "The reused chunks in the prompt's order. A token is shaded by its squared V deviation, mean over layers."
    heat = HeatMap("V deviation of a token, as a multiple of the mean token's", passages)
    return Section("Tokens", (text,), heat=heat)


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
