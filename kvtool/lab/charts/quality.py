"""The quality report for people: sections of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.lab.charts.page import Section, Table
from kvtool.lab.charts.svg import Line, Panel, line_charts

_HEAD = (
    *("run", "n", "F1", "of full", "contains", "KL first", "KL answer", "same answer"),
    *("recomputed", "TTFT ms", "speedup", "Pareto"),
)


def quality_sections(value: dict[str, Any]) -> list[Section]:
    """Sections from what `inspect quality --json` gives."""
    runs = value["runs"]
    text = (
        "KL: how far a run's distributions are from full recompute's, in nats, before the first token and mean over "
        "the full answer; in brackets the 95 % interval over questions. Pareto: no other run recomputes less and is "
        "nearer to full."
    )
    return [
        Section("Distance against recompute", (text,), (_charts(runs),) if len(runs) > 1 else ()),
        Section("All runs", tables=(quality_table(value),)),
    ]


def _charts(runs: Sequence[dict[str, Any]]) -> str:
    panels = [
        Panel(title, tuple(Line(mode, points) for mode, points in _by_mode(runs, name)))
        for title, name in (("KL of the answer, nats", "kl_answer"), ("F1", "f1"))
        if any(name in row for row in runs)
    ]
    return line_charts("Modes by how much they recompute", panels, "% of the cached tokens recomputed")


def _by_mode(runs: Sequence[dict[str, Any]], name: str) -> list[tuple[str, tuple[tuple[float, float], ...]]]:
    """Points of each mode, ascending; shares are rounded so that modes with the same ratio stand below each other."""
    found: dict[str, dict[float, float]] = {}
    for row in runs:
        if name in row:
            found.setdefault(row["run"].partition(":")[0], {})[round(100 * row["recomputed_share"])] = row[name]
    return [(mode, tuple(sorted(points.items()))) for mode, points in found.items()]


def quality_table(value: Mapping[str, Any]) -> Table:
    """All runs, a row each; the same in a terminal."""
    return Table(_HEAD, tuple(_row(row) for row in value["runs"]))


def _row(row: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        row["run"],
        row["count"],
        *(_with_interval(row, name) for name in ("f1", "f1_ratio", "contains", "kl_first", "kl_answer")),
        f"{row['answer_equal']:.1%}",
        f"{row['recomputed_share']:.1%}",
        f"{row['ttft_ms_median']:.0f}",
        f"{row['speedup']:.2f}x",
        "*" if row["pareto"] else "",
    )


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    """A run's number with its interval, or a dash."""
    if row.get(name) is None:
        return "-"
    low, high = row["intervals"][name]
    return f"{row[name]:.3f} [{low:.3f}, {high:.3f}]"
