"""The sparsity report for people: sections of a page."""

from __future__ import annotations

from typing import Any

from kvtool.lab.charts.page import Section, Table
from kvtool.lab.charts.svg import Line, Panel, line_charts

MODES = {"full": "full", "reuse": "reuse", "epic": "epic", "union": "union"}


def sparsity_sections(value: dict[str, Any]) -> list[Section]:
    """Sections from what `inspect sparsity --json` gives."""
    found = [_masses(value), _by_layer(value), _keys(value), _heads(value)]
    return [*found, _stability(value["stability"])] if value["stability"] else found


def tallies_of(value: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every tally of a report by whose attention it is and over which cache."""
    both = (("chunks", value["chunks_over"]), ("question", value["question_over"]))
    return {f"{whose}, {cache}": tally for whose, over in both for cache, tally in over.items()}


def _masses(value: dict[str, Any]) -> Section:
    text = (
        "The part of the attention that each class of key gets, mean over rows, layers and heads: the prompt's "
        f"first token (sink), the instruction, the first {value['start_tokens']} tokens of every chunk, the rest of "
        "the row's own chunk, of the other chunks, and the question."
    )
    return Section("Attention by class of key", (text,), tables=(mass_table(value),))


def mass_table(value: dict[str, Any]) -> Table:
    """The attention by class of key, and how few keys hold most of it; the same in a terminal."""
    rows = [("share of the keys", *_percent(value["class_share"]), "")]
    rows += [
        (name, *_percent(tally["mass"]), f"{tally['keys_for_mass']:.1%}") for name, tally in tallies_of(value).items()
    ]
    return Table(("attention of", *value["classes"], f"keys for {value['mass_held']:.0%}"), tuple(rows))


def _percent(parts: dict[str, float]) -> list[str]:
    return [f"{part:z.1%}" for part in parts.values()]  # z: what is rounded to nothing has no sign


def _by_layer(value: dict[str, Any]) -> Section:
    tallies, panels = tallies_of(value), []
    for title in ("chunks, full", "question, full"):
        layers = tallies[title]["layers"]
        lines = (Line(name, tuple((row["layer"], row["mass"][name]) for row in layers)) for name in value["classes"])
        panels.append(Panel(title, tuple(lines)))
    return Section("By layer", figures=(line_charts("Attention mass by class of key", panels, "layer"),))


def _keys(value: dict[str, Any]) -> Section:
    lines = tuple(
        Line(name, tuple((row["layer"], row["keys_for_mass"]) for row in tally["layers"]))
        for name, tally in tallies_of(value).items()
    )
    title = f"Share of the keys that holds {value['mass_held']:.0%} of the attention"
    return Section("How few keys", figures=(line_charts(title, [Panel("share of keys", lines)], "layer"),))


def _heads(value: dict[str, Any]) -> Section:
    layers = value["question_over"]["full"]["layers"]
    heads = range(len(layers[0]["heads"]))
    head = ("layer", *(f"head {number}" for number in heads))
    rows = tuple(
        (row["layer"], *(f"{one['mass']['sink'] + one['mass']['chunk starts']:.0%}" for one in row["heads"]))
        for row in layers
    )
    text = "The question's attention on the sink and on the first tokens of chunks together, head by head, in full."
    return Section("Sinks by head", (text,), tables=(Table(head, rows),))


def _stability(value: dict[str, Any]) -> Section:
    lines = (
        Line("shared", tuple(enumerate(value["by_layer"]))),
        Line("by chance", tuple((layer, value["chance"]) for layer in range(len(value["by_layer"])))),
    )
    text = (
        f"EPIC's premise: the positions that matter do not hang on the question. {value['questions']} questions over "
        f"the same chunks, each with the {value['share']:.0%} of the positions that it looks at most: two questions "
        f"share {value['mean']:.0%} of them (by chance {value['chance']:.0%}). {value['starts']:.0%} of them are first "
        f"tokens of a chunk, which {value['starts_chance']:.0%} of the positions are."
    )
    chart = line_charts("Heavy positions that two questions share", [Panel("share", lines)], "layer")
    return Section("Static sparsity", (text,), (chart,))
