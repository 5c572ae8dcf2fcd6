"""`kvtool inspect deviation`: how far reused KV is from full prefill's, and which tokens it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtool.cli.inspect_subject import Subject, laid_out
from kvtool.cli.options import Run
from kvtool.cli.spark import sparkline

if TYPE_CHECKING:
    from kvtool.core.fusion.plan import Plan


def deviation(run: Run, store: Any, about: Subject) -> None:
    """Measure, tell, and write the page."""
    requests = about.requests("deviation")
    prompts = laid_out(run, store, requests)
    session = prompts.session
    from kvtool.lab.charts.deviation import deviation_sections
    from kvtool.lab.measure.caches import Subject as Prompt
    from kvtool.lab.measure.deviation import deviation_report
    from kvtool.lab.measure.means import mean_of

    reports, texts = [], []
    with run.out.progress("prompts", total=len(prompts.asked), unit="prompts") as bar:
        for asked in prompts.asked:
            found = deviation_report(Prompt.of(session.decoder, asked.plan, prompts.source))
            texts.append(_texts(asked.plan, found.pop("token_deviation"), session.tokenizer))
            reports.append(found)
            bar.advance(1)
    value = prompts.facts | {"prompts": len(reports)} | mean_of(reports)
    value["chunks"] = [
        {"id": one.source.chunk_id.hex(), "pieces": [{"text": text, "deviation": worth} for text, worth in pieces]}
        for one, pieces in zip(_hits(prompts.asked[0].plan), texts[0], strict=True)
    ]
    facts = prompts.told() | {"prompts": len(reports)}
    about.write_page(run, "KV deviation", facts, deviation_sections(value, texts[0]), prompts.read_at)
    run.out.result(value, human=lambda: _show(run, value, prompts.read_at))


def _hits(plan: Plan) -> list[Any]:
    return [one for one in plan.chunks if one.status == "hit"]


def _texts(plan: Plan, worth: Sequence[float], tokenizer: Any) -> list[list[tuple[str, float]]]:
    """Each reused chunk's text in pieces; several tokens that make one character are one piece."""
    from kvtool.lab.measure.chunk import pieces

    left = iter(worth)
    return [list(pieces(one.ids, [next(left) for _ in one.ids], tokenizer)) for one in _hits(plan)]


def _show(run: Run, value: dict[str, Any], read_at: str) -> None:
    head = ("layer", "K", "V", "top 5 %", "top 15 %", "rank correlation")
    rows = [
        (
            row["layer"],
            f"{row['k_relative']:.3f}",
            f"{row['v_relative']:.3f}",
            f"{row['top_share']['0.05']:.0%}",
            f"{row['top_share']['0.15']:.0%}",
            "-" if row["spearman_next"] is None else f"{row['spearman_next']:.2f}",
        )
        for row in value["layers"]
    ]
    run.out.print(f"KV deviation, {read_at}")
    run.out.table(head, rows)
    run.out.print("K, V: deviation over size; top: share of the squared V deviation that these tokens hold;")
    run.out.print("rank correlation: of the tokens' V deviation with the next layer's")
    run.out.print(f"V by layer           {sparkline([row['v_relative'] for row in value['layers']])}")
    run.out.print(f"rank correlation     {sparkline([row['spearman_next'] for row in value['layers']])}")
    ratios = list(dict.fromkeys(row["ratio"] for row in value["attention"]))
    choices = list(dict.fromkeys(row["choice"] for row in value["attention"]))
    by = {(row["choice"], row["ratio"]): row["deviation"] for row in value["attention"]}
    run.out.table(
        ("recomputed", *choices),
        [(f"{ratio:.0%}", *(f"{by[choice, ratio]:.3f}" for choice in choices)) for ratio in ratios],
        title="deviation of the question's attention",
    )
