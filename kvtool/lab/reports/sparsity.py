"""`kvtool inspect sparsity`: where attention goes, and how few keys take most of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.lab.charts.page import Table
from kvtool.lab.charts.spark import sparkline
from kvtool.lab.reports.questions import BatchOptions, questions
from kvtool.lab.reports.report import RETRIEVAL, Desk, Findings, Report


def sparsity(desk: Desk) -> Findings:
    """Measure the attention of the first question's prompt; further questions are asked over the same chunks."""
    requests, options = questions(desk, "sparsity"), desk.query_options(*RETRIEVAL, "level")
    from kvtool.core.model.prompt import question_tokens
    from kvtool.lab.charts.sparsity import sparsity_sections
    from kvtool.lab.measure.exact import lay_out_exactly
    from kvtool.lab.measure.reused import ReusedPrompt
    from kvtool.lab.measure.sparsity import sparsity_report

    session = desk.session
    session.identity.check_movable("inspect sparsity")
    prompts = lay_out_exactly(session, requests[:1], options)
    others = [question_tokens(session.tokenizer, request.question, session.parts) for request in requests[1:]]
    desk.events.step("prompts", 1, "prompts")
    prompt = ReusedPrompt.of(session.decoder, prompts.asked[0].plan, prompts.source)
    value = prompts.facts | sparsity_report(prompt, others)
    read_at = prompts.read_at
    return Findings("Attention sparsity", value, [*_told(value, read_at)], sparsity_sections(value), read_at)


def _told(value: dict[str, Any], read_at: str) -> Iterator[str | Table]:
    from kvtool.lab.charts.sparsity import mass_table, tallies_of

    yield f"Attention sparsity, {read_at}"
    yield mass_table(value)
    yield f"keys for {value['mass_held']:.0%}: the share of the keys that a row sees that hold so much of its attention"
    for name, tally in tallies_of(value).items():
        starts = [row["mass"]["sink"] + row["mass"]["chunk starts"] for row in tally["layers"]]
        yield f"sink and starts by layer, {name:<16} {sparkline(starts)}"
    if (stability := value["stability"]) is not None:
        yield (
            f"two of {stability['questions']} questions share {stability['mean']:.0%} of their heaviest "
            f"{stability['share']:.0%} of positions (by chance {stability['chance']:.0%}); {stability['starts']:.0%} "
            f"of these are starts of chunks ({stability['starts_chance']:.0%} of all positions are)"
        )


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
