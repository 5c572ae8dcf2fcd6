"""`kvtool inspect sparsity`: attention by class of key, and the few keys that take most of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.reports.charts import Line, Panel, line_charts, series, sparkline
from kvtool.reports.page import Section, Table
from kvtool.reports.report import RETRIEVAL, BatchOptions, Report, ReportContext, ReportResult, Shown


def sparsity(context: ReportContext) -> ReportResult:
    """Measure the attention of the first question's prompt; further questions are asked over the same chunks."""
    requests, options = context.questions("sparsity"), context.query_options(*RETRIEVAL, "level")
    from kvtool.core.model.prompt import question_tokens
    from kvtool.reports.attention_mass import sparsity_report
    from kvtool.reports.reused_prompt import ReusedPrompt, lay_out_exactly

    session = context.session
    session.identity.check_movable("inspect sparsity")
    prompts = lay_out_exactly(session, requests[:1], options)
    others = [question_tokens(session.tokenizer, request.question, session.parts) for request in requests[1:]]
    context.events.step("prompts", 1, "prompts")
    prompt = ReusedPrompt.of(session.decoder, prompts.asked[0].plan, prompts.source)
    value, read_at = prompts.facts | sparsity_report(prompt, others), prompts.read_at
    return ReportResult("Attention sparsity", value, [*_summary(value, read_at)], _sections(value), read_at)


def _summary(value: Mapping[str, Any], read_at: str) -> Iterator[Shown]:
    yield f"Attention sparsity, {read_at}"
    yield _masses(value)
    yield f"keys for {value['mass_threshold']:.0%}: the share of the visible keys that hold so much of its attention"
    for name, tally in _tallies(value).items():
        starts = [_starts(row) for row in tally["layers"]]
        yield f"sink and starts by layer, {name:<16} {sparkline(starts)}"
    if (stability := value["stability"]) is not None:
        yield (
            f"two of {stability['questions']} questions share {stability['mean_share']:.0%} of their heaviest "
            f"{stability['share']:.0%} of positions (by chance {stability['chance_share']:.0%}); "
            f"{stability['start_share']:.0%} of these are starts of chunks ({stability['start_chance']:.0%} of all are)"
        )


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


# ---- on a page ----


def _sections(value: Mapping[str, Any]) -> Iterator[Section]:
    tallies = _tallies(value)
    text = (
        "The part of the attention that goes to each class of key, mean over rows, layers and heads: the prompt's "
        f"first token (sink), the instruction, the first {value['start_tokens']} tokens of every chunk, the rest of "
        "the row's own chunk, of the other chunks, and the question."
    )
    yield Section("Where attention goes", (text,), tables=(_masses(value),))
    panels = [
        Panel(title, tuple(_mass(name, tallies[title]["layers"]) for name in value["classes"]))
        for title in ("chunks, full", "question, full")
    ]
    yield Section("By layer", figures=(line_charts("Attention mass by class of key", panels, "layer"),))
    lines = tuple(series(name, tally["layers"], "layer", "keys_for_mass") for name, tally in tallies.items())
    title = f"Share of the keys that holds {value['mass_threshold']:.0%} of the attention"
    yield Section("How few keys", figures=(line_charts(title, [Panel("share of keys", lines)], "layer"),))
    yield _heads(value["question_attention"]["full"]["layers"])
    if value["stability"]:
        yield _stability(value["stability"])


def _mass(name: str, layers: list[dict[str, Any]]) -> Line:
    return Line(name, tuple((row["layer"], row["mass"][name]) for row in layers))


def _heads(layers: list[dict[str, Any]]) -> Section:
    head = ("layer", *(f"head {number}" for number in range(len(layers[0]["heads"]))))
    rows = tuple((row["layer"], *(f"{_starts(one):.0%}" for one in row["heads"])) for row in layers)
    text = "The question's attention on the sink and on the first tokens of chunks together, head by head, in full."
    return Section("Sinks by head", (text,), tables=(Table(head, rows),))


def _stability(value: Mapping[str, Any]) -> Section:
    lines = (
        Line("shared", tuple(enumerate(value["by_layer"]))),
        Line("by chance", tuple((layer, value["chance_share"]) for layer in range(len(value["by_layer"])))),
    )
    text = (
        f"EPIC's premise: the positions that matter do not hang on the question. {value['questions']} questions over "
        f"the same chunks, each with the {value['share']:.0%} of the positions that it looks at most: two questions "
        f"share {value['mean_share']:.0%} of them (by chance {value['chance_share']:.0%}). "
        f"{value['start_share']:.0%} of them are first tokens of a chunk ({value['start_chance']:.0%} of all are)."
    )
    chart = line_charts("Heavy positions that two questions share", [Panel("share", lines)], "layer")
    return Section("Static sparsity", (text,), (chart,))


REPORT = Report(
    sparsity,
    takes=(BatchOptions, ChunkChoice, QueryOptions.some(*RETRIEVAL, "level"), ModelOptions),
    about="QUESTION",
    about_help="What is asked; or --batch.",
    examples=(
        'inspect sparsity "Who founded the observatory?"',
        "inspect sparsity --batch questions.jsonl --html sparsity.html",
    ),
)
