"""`kvtool inspect deviation` and `sparsity`: what reuse changes in a prompt, and where attention goes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.reports.report import RETRIEVAL, Report, ReportContext, ReportResult, Shown, Table, sparkline

if TYPE_CHECKING:
    from kvtool.core.query.prompt import PromptLayout
    from kvtool.reports.reused_prompt import ReusedPrompt

_EXACT = "exact"  # raw or lossless records
_TAKES = (ChunkChoice, QueryOptions.some(*RETRIEVAL, "level"), ModelOptions)


def deviation(context: ReportContext) -> ReportResult:
    """Compare a prompt's reused keys and values with full prefill's, by layer and by token."""
    asked, prompt, facts = _prompt(context, "deviation")
    from kvtool.reports.reused_prompt import deviation_report

    report = deviation_report(prompt)
    chunks = [*_chunks(asked, report.pop("token_deviation"), context.session.tokenizer)]
    value = facts | report | {"chunks": chunks}
    return ReportResult("KV deviation", value, [*_deviations(value)], [_pieces(chunks)])


def sparsity(context: ReportContext) -> ReportResult:
    """Measure the attention of a question's prompt: by class of key, and how few keys take most of it."""
    _, prompt, facts = _prompt(context, "sparsity")
    from kvtool.reports.reused_prompt import sparsity_report

    value = facts | sparsity_report(prompt)
    return ReportResult("Attention sparsity", value, [*_sparsities(value)], _by_layer(value))


def _prompt(context: ReportContext, report: str) -> tuple[PromptLayout, ReusedPrompt, dict[str, Any]]:
    request, options = context.question(report), context.query_options(*RETRIEVAL, "level")
    from kvtool.reports.reused_prompt import lay_out_exactly

    context.identity.check_movable(f"inspect {report}")
    session, identity = context.session, context.identity
    asked, prompt = lay_out_exactly(session, request, options)
    resolved = {"model": identity.model, "dtype": session.model.arithmetic.dtype, "lead_in": identity.lead_in.mode}
    level = _EXACT if options.level == "auto" else options.level
    return asked, prompt, {"question": request.question, "resolved": resolved, "level": level}


def _read_at(value: Mapping[str, Any]) -> str:
    return "from exact records" if value["level"] == _EXACT else f"chunks read at level {value['level']}"


# ---- deviation ----


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


def _deviations(value: Mapping[str, Any]) -> Iterator[Shown]:
    layers = value["layers"]
    yield f"KV deviation, {_read_at(value)}"
    head = ("layer", "K", "V", "top 5 %", "top 15 %", "rank correlation")
    yield Table(head, tuple(_row(layer) for layer in layers))
    yield "K, V: deviation over size; top: share of the squared V deviation that these tokens hold;"
    yield "rank correlation: of the tokens' V deviation with the next layer's"
    yield f"V by layer           {sparkline([row['v_relative'] for row in layers])}"
    yield f"rank correlation     {sparkline([row['spearman_next'] for row in layers])}"
    yield "deviation of the question's attention, if the most deviating tokens are recomputed:"
    rows = tuple((f"{row['ratio']:.0%}", f"{row['deviation']:.3f}") for row in value["attention"])
    yield Table(("recomputed", "deviation"), rows)


def _row(layer: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        layer["layer"],
        f"{layer['k_relative']:.3f}",
        f"{layer['v_relative']:.3f}",
        f"{layer['top_share']['0.05']:.0%}",
        f"{layer['top_share']['0.15']:.0%}",
        "-" if layer["spearman_next"] is None else f"{layer['spearman_next']:.2f}",
    )


def _pieces(chunks: Sequence[Mapping[str, Any]]) -> Table:
    rows = (
        (chunk["source"], chunk["start"], piece["text"], f"{piece['deviation']:.3g}")
        for chunk in chunks
        for piece in chunk["pieces"]
    )
    title = "squared V deviation of each token, as a multiple of the mean token's"
    return Table(("source", "chunk from", "token", "deviation"), tuple(rows), title)


# ---- sparsity ----


def _sparsities(value: Mapping[str, Any]) -> Iterator[Shown]:
    yield f"Attention sparsity, {_read_at(value)}"
    yield _masses(value)
    yield f"keys for {value['mass_threshold']:.0%}: the share of the visible keys that hold so much of its attention"
    for name, tally in _tallies(value).items():
        starts = [_starts(row) for row in tally["layers"]]
        yield f"sink and starts by layer, {name:<16} {sparkline(starts)}"


def _tallies(value: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    both = (("chunks", value["chunk_attention"]), ("question", value["question_attention"]))
    return {f"{rows}, {cache}": tally for rows, over in both for cache, tally in over.items()}


def _starts(row: Mapping[str, Any]) -> float:
    mass: float = row["mass"]["sink"] + row["mass"]["chunk starts"]
    return mass


def _masses(value: Mapping[str, Any]) -> Table:
    rows = [("share of the keys", *_percent(value["class_share"]), "")]
    rows += [
        (name, *_percent(tally["mass"]), f"{tally['keys_for_mass']:.1%}") for name, tally in _tallies(value).items()
    ]
    return Table(("attention of", *value["classes"], f"keys for {value['mass_threshold']:.0%}"), tuple(rows))


def _percent(parts: Mapping[str, float]) -> list[str]:
    return [f"{part:z.1%}" for part in parts.values()]  # z: a number that is rounded to 0 has no sign


def _by_layer(value: Mapping[str, Any]) -> Iterator[Table]:
    head = ("layer", *value["classes"], f"keys for {value['mass_threshold']:.0%}")
    for name, tally in _tallies(value).items():
        rows = ((row["layer"], *_percent(row["mass"]), f"{row['keys_for_mass']:.1%}") for row in tally["layers"])
        yield Table(head, tuple(rows), f"attention of {name}, by layer")
    layers = value["question_attention"]["full"]["layers"]
    head = ("layer", *(f"head {number}" for number in range(len(layers[0]["heads"]))))
    rows = ((row["layer"], *(f"{_starts(heads):.0%}" for heads in row["heads"])) for row in layers)
    yield Table(head, tuple(rows), "sink and starts of chunks: attention of question, full, by head")


DEVIATION = Report(
    deviation,
    takes=_TAKES,
    about="QUESTION",
    about_help="What is asked.",
    examples=(
        'inspect deviation "Who founded the observatory?"',
        'inspect deviation "Who founded the observatory?" --html deviation.html',
    ),
)
SPARSITY = Report(
    sparsity,
    takes=_TAKES,
    about="QUESTION",
    about_help="What is asked.",
    examples=(
        'inspect sparsity "Who founded the observatory?"',
        'inspect sparsity "Who founded the observatory?" --html sparsity.html',
    ),
)
