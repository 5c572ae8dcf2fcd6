"""The calibration of deferred loading for people: sections of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.lab.charts.page import Section, Table
from kvtool.lab.charts.svg import Line, Panel, line_charts

_BIN_HEAD = ("run", "confidence", "answers", "mean confidence", "contain a gold answer", "95 %", "F1")
_POLICY_HEAD = ("run", "policy", "threshold", "F1", "contains", "chunks", "rounds", "bytes of all")


def defer_sections(value: dict[str, Any]) -> list[Section]:
    """Sections from what `inspect quality --defer --json` gives."""
    runs = value["runs"]
    text = (
        f"Confidence: the geometric mean of the probabilities of an answer's first {value['probed']} tokens. Counted "
        "is every round but a question's last, on which nothing hangs."
    )
    costs = (
        f"Calibrated: the lowest threshold that loses at most {value['allowed_loss']:g} of F1 and of `contains` "
        "against one pass over all chunks, as without --defer. Held out: each half of the questions by the threshold "
        "of the other half."
    )
    return [
        Section(
            "Calibration",
            (text,),
            (_calibration(runs),) if any(run["bins"] for run in runs) else (),
            (bin_table(value),),
        ),
        Section(
            "Threshold",
            (costs,),
            (_thresholds(runs),),
            (policy_table(value),),
        ),
    ]


def _calibration(runs: Sequence[dict[str, Any]]) -> str:
    panels = [
        Panel(
            title,
            tuple(
                Line(run["run"], tuple((round((row["low"] + row["high"]) / 2, 3), row[key]) for row in run["bins"]))
                for run in runs
                if run["bins"]
            ),
        )
        for title, key in (("Share of answers that contain a gold one", "contains"), ("Number of answers", "count"))
    ]
    return line_charts("Is a sure answer right?", panels, "confidence, middle of a bin")


def _thresholds(runs: Sequence[dict[str, Any]]) -> str:
    panels = [
        Panel(
            title,
            tuple(Line(run["run"], tuple((row["threshold"], row[key]) for row in run["policies"])) for run in runs),
        )
        for title, key in (("F1", "f1"), ("Contains", "contains"), ("Bytes read, of loading all", "bytes_share"))
    ]
    return line_charts("What a threshold gives", panels, "threshold")


def bin_table(value: Mapping[str, Any]) -> Table:
    """The answers of each run by how sure they were; the same in a terminal."""
    return Table(_BIN_HEAD, tuple(row for run in value["runs"] for row in _bin_rows(run)))


def policy_table(value: Mapping[str, Any]) -> Table:
    """What each run gives: in one pass, in all rounds, after the first, as calibrated; the same in a terminal."""
    return Table(_POLICY_HEAD, tuple(row for run in value["runs"] for row in _policy_rows(run)))


def _bin_rows(run: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (
            run["run"],
            f"{row['low']:.1f} to {row['high']:.1f}",
            row["count"],
            f"{row['confidence']:.3f}",
            f"{row['contains']:.3f}",
            "[{:.3f}, {:.3f}]".format(*row["interval"]) if row["interval"] else "-",
            f"{row['f1']:.3f}",
        )
        for row in run["bins"]
    ]


def _policy_rows(run: dict[str, Any]) -> list[tuple[object, ...]]:
    """A run's policies, a line each: one pass, all rounds, the first alone, as calibrated, and held out."""
    named = (("all rounds", "all"), ("first round only", "first"), ("calibrated", "chosen"), ("held out", "held_out"))
    whole = run["whole"]
    scores = f"{whole['f1']:.3f}", f"{whole['contains']:.3f}"
    one_pass = (run["run"], "one pass", "-", *scores, f"{whole['chunks']:.2f}", "-", "100.0%")
    return [one_pass] + [
        (
            run["run"],
            name,
            f"{run['threshold']:.3f}" if key == "chosen" else "-",
            f"{row['f1']:.3f}",
            f"{row['contains']:.3f}",
            f"{row['chunks']:.2f}",
            f"{row['rounds']:.2f}",
            f"{row['bytes_share']:.1%}",
        )
        for name, key in named
        if (row := run[key]) is not None
    ]
