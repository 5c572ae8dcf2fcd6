"""The quality report for people: sections of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtool.lab.charts.page import Section, Table
from kvtool.lab.charts.svg import Line, Panel, line_charts

_HEAD = ("run", "questions", "F1", "contains", "KL first token", "KL answer", "recomputed", "speedup", "Pareto")


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
        Section("All runs", tables=(Table(_HEAD, tuple(_row(row) for row in runs)),)),
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


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    cells = [with_interval(row, name) for name in ("f1", "contains", "kl_first", "kl_answer")]
    share, speedup = f"{row['recomputed_share']:.1%}", f"{row['speedup']:.2f}x"
    return (row["run"], row["count"], *cells, share, speedup, "*" if row["pareto"] else "")


def with_interval(row: dict[str, Any], name: str) -> str:
    """A run's number with its interval, or a dash."""
    if row.get(name) is None:
        return "-"
    low, high = row["intervals"][name]
    return f"{row[name]:.3f} [{low:.3f}, {high:.3f}]"
