"""`kvtool inspect deviation`: how far reused KV is from full prefill's, and which tokens it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.lab.charts.deviation import CHOICES
from kvtool.lab.charts.page import Table
from kvtool.lab.charts.spark import sparkline
from kvtool.lab.reports.questions import BatchOptions, questions
from kvtool.lab.reports.report import RETRIEVAL, Desk, Findings, Report

if TYPE_CHECKING:
    from kvtool.core.fusion.plan import Plan, Segment
    from kvtool.core.query.prompt import PromptLayout

_SHIFT = ("layer", "K", "K shifted", "V", "V shifted")
_HEAD = ("layer", "K", "V", "top 5 %", "top 15 %", "rank correlation")


def deviation(desk: Desk) -> Findings:
    """Compare a prompt's reused keys and values with full prefill's, by layer and by token."""
    requests, options = questions(desk, "deviation"), desk.query_options(*RETRIEVAL, "level")
    from kvtool.lab.charts.deviation import deviation_sections
    from kvtool.lab.measure.deviation import deviation_report
    from kvtool.lab.measure.exact import lay_out_exactly
    from kvtool.lab.measure.means import mean_of
    from kvtool.lab.measure.reused import ReusedPrompt

    desk.identity.check_movable("inspect deviation")
    prompts = lay_out_exactly(desk.session, requests, options)
    reports, texts = [], []
    desk.events.step("prompts", len(requests), "prompts")
    for asked in prompts.asked:
        report = deviation_report(ReusedPrompt.of(desk.session.decoder, asked.plan, prompts.source))
        texts.append(_texts(asked.plan, report.pop("token_deviation"), desk.session.tokenizer))
        reports.append(report)
        desk.events.advance(1)
    value = prompts.facts | {"prompts": len(reports)} | mean_of(reports)
    value["chunks"] = [*_chunks(prompts.asked[0], texts[0])]
    read_at, sections = prompts.read_at, deviation_sections(value)
    return Findings("KV deviation", value, [*_told(value, read_at)], sections, read_at)


def _chunks(asked: PromptLayout, texts: Sequence[Sequence[tuple[str, float]]]) -> Iterator[dict[str, Any]]:
    """The reused chunks of a prompt, each with where it stands and its pieces."""
    places = [
        hit.passage for hit, segment in zip(asked.hits, asked.plan.chunks, strict=True) if segment.status == "hit"
    ]
    for place, segment, pieces in zip(places, _hits(asked.plan), texts, strict=True):
        yield {
            "id": segment.source.chunk_id.hex(),
            "source": place.source,
            "start": place.start,
            "end": place.end,
            "pieces": [{"text": text, "deviation": worth} for text, worth in pieces],
        }


def _hits(plan: Plan) -> list[Segment]:
    return [segment for segment in plan.chunks if segment.status == "hit"]


def _texts(plan: Plan, worth: Sequence[float], tokenizer: Any) -> list[list[tuple[str, float]]]:
    """Cut each reused chunk's text into pieces; several tokens that make one character are one piece."""
    from kvtool.core.model.tokens import whole_characters

    ends = itertools.accumulate((len(segment.ids) for segment in _hits(plan)), initial=0)
    return [
        [(text, max(worth[at + start : at + stop])) for start, stop, text in whole_characters(tokenizer, segment.ids)]
        for at, segment in zip(ends, _hits(plan), strict=False)
    ]


def _told(value: Mapping[str, Any], read_at: str) -> Iterator[str | Table]:
    layers, attention = value["layers"], value["attention"]
    yield f"KV deviation, {read_at}"
    yield Table(_HEAD, tuple(_row(layer) for layer in layers))
    yield "K, V: deviation over size; top: share of the squared V deviation that these tokens hold;"
    yield "rank correlation: of the tokens' V deviation with the next layer's"
    yield f"V by layer           {sparkline([row['v_relative'] for row in layers])}"
    yield f"rank correlation     {sparkline([row['spearman_next'] for row in layers])}"
    ratios, choices = (list(dict.fromkeys(row[name] for row in attention)) for name in ("ratio", "choice"))
    by = {(row["choice"], row["ratio"]): f"{row['deviation']:.3f}" for row in attention}
    yield "deviation of the question's attention:"
    rows = tuple((f"{ratio:.0%}", *(by[choice, ratio] for choice in choices)) for ratio in ratios)
    yield Table(("recomputed", *(CHOICES[choice] for choice in choices)), rows)
    shift = value["shift"]
    yield f"what {shift['tokens_shifted']:.0f} reused tokens beside `union`'s {shift['ratio']:.0%} deviate by:"
    yield Table(_SHIFT, tuple(_shifted(layer) for layer in shift["layers"]))


def _shifted(layer: Mapping[str, Any]) -> tuple[object, ...]:
    names = ("k_before", "k_after", "v_before", "v_after")
    return (layer["layer"], *(f"{layer[name]:.3f}" for name in names))


def _row(layer: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        layer["layer"],
        f"{layer['k_relative']:.3f}",
        f"{layer['v_relative']:.3f}",
        f"{layer['top_share']['0.05']:.0%}",
        f"{layer['top_share']['0.15']:.0%}",
        "-" if layer["spearman_next"] is None else f"{layer['spearman_next']:.2f}",
    )


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
