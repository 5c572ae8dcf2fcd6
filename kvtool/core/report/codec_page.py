"""The codec report for people: sections of a page."""

from __future__ import annotations

from typing import Any

from kvtool.core.report.page import Section, Table
from kvtool.core.report.svg import Line, Panel, line_charts

HEAD = ("scheme", "bits/element", "of 16 bit", "KL of answers", "KL of first", "same tokens", "F1")


def codec_rows(value: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    """A row under HEAD for each scheme."""
    return tuple(
        (
            row["scheme"],
            f"{row['bits_per_element']:.3f}",
            f"{row['ratio_vs_16bit']:.2f}x",
            f"{row['kl_answer']:.4f}",
            f"{row['kl_first']:.4f}",
            f"{row['top1_agrees']:.1%}",
            f"{row['f1']:.3f}" if "f1" in row else "-",
        )
        for row in value["schemes"]
    )


def codec_sections(value: dict[str, Any]) -> list[Section]:
    """Sections from what `inspect codec --json` gives."""
    points = {round(row["bits_per_element"], 2): max(row["kl_answer"], 1e-6) for row in value["schemes"]}
    chart = line_charts(
        "What fewer bits lose",
        [Panel("KL of the answer, nats", (Line("schemes", tuple(sorted(points.items()))),), logarithmic=True)],
        "bits per element",
    )
    text = "Each scheme's records in place of the exact ones, all else equal: how far the answers' distributions move."
    return [Section("Levels", (text,), (chart,) if len(points) > 1 else (), (Table(HEAD, codec_rows(value)),))]
