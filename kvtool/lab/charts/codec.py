"""The codec report for people: sections of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtool.lab.charts.page import Section, Table
from kvtool.lab.charts.svg import Line, Panel, line_charts

_HEAD = ("scheme", "bits/element", "of 16 bit", "KL of answers", "KL of first", "same tokens", "F1")
_MOST_LINES = 6  # of a panel
_SHOWN = ("int8", "int4", "anchor-1", "mean-2", "1", "2", "3", "4")


def codec_table(value: dict[str, Any]) -> Table:
    """All schemes, a row each; the same in a terminal."""
    return Table(_HEAD, tuple(_row(row) for row in value["schemes"]))


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["scheme"],
        f"{row['bits_per_element']:.3f}",
        f"{row['ratio_vs_16bit']:.2f}x",
        f"{row['kl_answer']:.4f}",
        f"{row['kl_first']:.4f}",
        f"{row['top1_agrees']:.1%}",
        f"{row['f1']:.3f}" if "f1" in row else "-",
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
    levels = Section("Levels", (text,), (chart,) if len(points) > 1 else (), (codec_table(value),))
    return [levels, _by_layer(value["schemes"])]


def _by_layer(schemes: Sequence[dict[str, Any]]) -> Section:
    """Where the bits go and where the errors are; of more schemes than can be told apart, the finest of each kind."""
    shown = schemes if len(schemes) <= _MOST_LINES else [row for row in schemes if row["scheme"] in _SHOWN]
    panels = [
        Panel(title, tuple(Line(row["scheme"], _points(row["layers"], name)) for row in shown))
        for title, name in (
            ("bits per element", "bits_per_element"),
            ("error of keys, relative", "k_relative_error"),
            ("error of values, relative", "v_relative_error"),
        )
    ]
    text = "Error: the norm of what a layer's decoded keys or values are off by, over the norm of the exact ones."
    return Section("By layer", (text,), (line_charts("Bits and errors by layer", panels, "layer"),))


def _points(layers: Sequence[dict[str, Any]], name: str) -> tuple[tuple[float, float], ...]:
    return tuple((row["layer"], row[name]) for row in layers)
