"""`kvtool inspect sparsity`: where attention goes, and how few keys take most of it."""

from __future__ import annotations

from typing import Any

from kvtool.cli.inspect_subject import Subject, laid_out
from kvtool.cli.options import Run
from kvtool.cli.spark import sparkline


def sparsity(run: Run, store: Any, about: Subject) -> None:
    """Measure the first question's prompt; the questions after it are asked over the same chunks."""
    requests = about.requests("sparsity")
    prompts = laid_out(run, store, requests[:1])
    session = prompts.session
    from kvtool.core.model.prompt import question_tokens
    from kvtool.lab.charts.sparsity import sparsity_sections
    from kvtool.lab.measure.caches import Subject as Prompt
    from kvtool.lab.measure.sparsity import sparsity_report

    others = [question_tokens(session.tokenizer, one.question, session.parts) for one in requests[1:]]
    with run.out.progress("prompts", total=1, unit="prompts") as bar:
        found = sparsity_report(Prompt.of(session.decoder, prompts.asked[0].plan, prompts.source), others)
        bar.advance(1)
    value = prompts.facts | found
    facts = prompts.told() | {"questions": len(requests)}
    about.write_page(run, "Attention sparsity", facts, sparsity_sections(value), prompts.read_at)
    run.out.result(value, human=lambda: _show(run, value, prompts.read_at))


def _show(run: Run, value: dict[str, Any], read_at: str) -> None:
    run.out.print(f"Attention sparsity, {read_at}")
    from kvtool.lab.charts.sparsity import tallies_of

    tallies = tallies_of(value)
    rows = [("share of the keys", *(f"{part:.1%}" for part in value["class_share"].values()), "")]
    rows += [
        (name, *(f"{part:.1%}" for part in tally["mass"].values()), f"{tally['keys_for_mass']:.1%}")
        for name, tally in tallies.items()
    ]
    held = f"keys for {value['mass_held']:.0%}"
    run.out.table(("attention of", *value["classes"], held), rows)
    run.out.print(f"{held}: the share of the keys that a row sees that holds so much of its attention")
    for name, tally in tallies.items():
        starts = [row["mass"]["sink"] + row["mass"]["chunk starts"] for row in tally["layers"]]
        run.out.print(f"sink and starts by layer, {name:<16} {sparkline(starts)}")
    if value["stability"] is not None:
        kept = value["stability"]
        run.out.print(
            f"two of {kept['questions']} questions share {kept['mean']:.0%} of their heaviest {kept['share']:.0%} of "
            f"positions (by chance {kept['chance']:.0%}); {kept['starts']:.0%} of these are starts of chunks "
            f"({kept['starts_chance']:.0%} of all positions are)"
        )
