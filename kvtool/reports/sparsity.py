"""`kvtool inspect sparsity`: attention by class of key, and the few keys that take most of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.reports.page import Shown, Table, sparkline
from kvtool.reports.report import RETRIEVAL, BatchOptions, Report, ReportContext, ReportResult


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
    return ReportResult("Attention sparsity", value, [*_summary(value, read_at)], _details(value))


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


def _details(value: Mapping[str, Any]) -> Iterator[Table]:
    head = ("layer", *value["classes"], f"keys for {value['mass_threshold']:.0%}")
    for name, tally in _tallies(value).items():
        rows = ((row["layer"], *_percent(row["mass"]), f"{row['keys_for_mass']:.1%}") for row in tally["layers"])
        yield Table(head, tuple(rows), f"attention of {name}, by layer")
    layers = value["question_attention"]["full"]["layers"]
    head = ("layer", *(f"head {number}" for number in range(len(layers[0]["heads"]))))
    rows = ((row["layer"], *(f"{_starts(heads):.0%}" for heads in row["heads"])) for row in layers)
    yield Table(head, tuple(rows), "sink and starts of chunks: attention of question, full, by head")


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
