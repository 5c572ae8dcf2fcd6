"""The codec report for people: sections of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtool.core.codec.levels import level_of
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
    schemes = value["schemes"]
    panel = Panel("KL of the answer, nats", _losses(schemes), logarithmic=True)
    chart = line_charts("What fewer bits lose", [panel], "bits per element", axis="logarithmic")
    text = "Each scheme's records in place of the exact ones, all else equal: how far the answers' distributions move."
    levels = Section("Levels", (text,), (chart,) if len(schemes) > 1 else (), (codec_table(value),))
    return [levels, _by_layer(schemes)]


def _losses(schemes: Sequence[dict[str, Any]]) -> tuple[Line, ...]:
    """A line for each kind of scheme: the levels, `int4` and `int8`, `mean-1` to `mean-4`, a share of the rows …"""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for row in schemes:
        kind = _kind(row["scheme"])
        kinds.setdefault(kind, []).append((float(f"{row['bits_per_element']:.3g}"), max(row["kl_answer"], 1e-6)))
    return tuple(Line(kind, tuple(sorted(points))) for kind, points in kinds.items())


def _kind(scheme: str) -> str:
    level = level_of(scheme)
    if level.share == 100:
        return scheme.rstrip("-0123456789") or "levels"
    return f"{level.share} % of rows" if level.profiled else f"rows, {level.inner}"


def _by_layer(schemes: Sequence[dict[str, Any]]) -> Section:
    """Plot bits and errors by layer; of more schemes than can be distinguished, the finest of each kind."""
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
