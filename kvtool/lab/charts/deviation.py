"""The deviation report for people: sections of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtool.core.codec.levels import lossy
from kvtool.lab.charts.page import HeatMap, Passage, Section
from kvtool.lab.charts.svg import Line, Panel, line_charts

CHOICES = {"hkvd": "highest deviation", "random": "at random", "first": "first of each chunk"}


def deviation_sections(value: dict[str, Any], tokens: Sequence[Sequence[tuple[str, float]]] = ()) -> list[Section]:
    """Sections from what `inspect deviation --json` gives.

    Parameters
    ----------
    tokens : pieces of each chunk's text with their deviation, those of one prompt.
    """
    return [
        _by_layer(value["layers"], value.get("level", "exact")),
        _concentration(value["layers"]),
        _neighbours(value["layers"]),
        _attention(value["attention"]),
        _shift(value["shift"]),
        *([_tokens(value["chunks"])] if value.get("chunks") else []),
    ]


def _by_layer(layers: Sequence[dict[str, Any]], level: str) -> Section:
    lines = tuple(
        Line(name, tuple((row["layer"], row[key]) for row in layers))
        for name, key in (("keys", "k_relative"), ("values", "v_relative"))
    )
    chart = line_charts("Deviation of reused KV from full prefill's", [Panel("‖Δ‖ / ‖full‖", lines)], "layer")
    text = (
        "How far the reused keys and values of the chunks' tokens are from those of a full prefill of the same "
        "prompt, layer by layer. "
    )
    if lossy([level]):
        text += f"They are read at level {level}: what it rounds away is part of the deviation, at every layer."
    else:
        text += "The first layer's depend on the token alone, so they do not deviate."
    return Section("By layer", (text,), (chart,))


def _concentration(layers: Sequence[dict[str, Any]]) -> Section:
    deviating = [row for row in layers if row["v_sse"] > 0] or list(layers)
    chosen = [deviating[0], deviating[len(deviating) // 2], deviating[-1]]
    lines = tuple(
        Line(f"layer {row['layer']}", tuple((100 * float(share), part) for share, part in row["top_share"].items()))
        for row in {row["layer"]: row for row in chosen}.values()
    )
    panel = Panel("share of the squared V deviation", lines)
    chart = line_charts("Concentration", [panel], "top % of the tokens", axis="linear")
    text = (
        "CacheBlend's first insight: few tokens hold most of the deviation. If it were spread evenly, the top 15 % of "
        "the tokens would hold 15 % of it."
    )
    return Section("Concentration", (text,), (chart,))


def _neighbours(layers: Sequence[dict[str, Any]]) -> Section:
    points = tuple((row["layer"], row["spearman_next"]) for row in layers if row["spearman_next"] is not None)
    text = (
        "CacheBlend's second insight: tokens that deviate much at one layer do at the next. Spearman's rank "
        "correlation of the tokens' V deviation, each layer with the one after it; 1 is the same order."
    )
    if not points:
        return Section("From layer to layer", (text,))
    chart = line_charts("Rank correlation with the next layer", [Panel("Spearman", (Line("V", points),))], "layer")
    return Section("From layer to layer", (text,), (chart,))


def _attention(rows: Sequence[dict[str, Any]]) -> Section:
    choices = list(dict.fromkeys(row["choice"] for row in rows))
    lines = tuple(
        Line(CHOICES[choice], tuple((100 * row["ratio"], row["deviation"]) for row in rows if row["choice"] == choice))
        for choice in choices
    )
    panel = Panel("‖A − A full‖ / ‖A full‖", lines)
    chart = line_charts("Attention deviation", [panel], "% of the tokens recomputed", axis="linear")
    text = (
        "How far the question's attention over the fused cache is from that over the full one, mean over layers, "
        "when so many of the reused tokens are recomputed: those that deviate most, random ones, the first of each "
        "chunk."
    )
    return Section("Attention against recompute", (text,), (chart,))


def _shift(shift: dict[str, Any]) -> Section:
    names = {"k_before": "keys", "k_after": "keys, shifted", "v_before": "values", "v_after": "values, shifted"}
    lines = tuple(Line(name, tuple((row["layer"], row[key]) for row in shift["layers"])) for key, name in names.items())
    chart = line_charts("Deviation of the rows that stay reused", [Panel("‖Δ‖ / ‖full‖", lines)], "layer")
    text = (
        f"`union` recomputes {shift['ratio']:.0%} of the tokens and moves the others by what these changed by, chunk "
        f"by chunk. Of the recomputed tokens' change in values their chunk has {shift['common']:.0%} in common."
    )
    return Section("Shifted reuse", (text,), (chart,))


def _tokens(chunks: Sequence[dict[str, Any]]) -> Section:
    passages = tuple(
        Passage(
            f"{number}: {chunk['source']}, characters {chunk['start']} to {chunk['end']}",
            tuple((piece["text"], piece["deviation"]) for piece in chunk["pieces"]),
        )
        for number, chunk in enumerate(chunks, 1)
    )
    text = "The reused chunks in the prompt's order. A token is shaded by its squared V deviation, mean over layers."
    return Section(
        "Tokens", (text,), heat=HeatMap("V deviation of a token, as a multiple of the mean token's", passages)
    )
