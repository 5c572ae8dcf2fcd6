"""The audits of a store for people: tables for a terminal, sections of a page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtool.core.common.sizes import counted
from kvtool.lab.charts.page import Section, Table
from kvtool.lab.charts.svg import Line, Panel, line_charts

_SPREAD = ("median", "p90", "p99", "max")
_HEAD = (
    *("run", "level", "lead-in", "audits", "recomputed"),
    *("KL answer: median", "answer: 90 %", "answer: 99 %", "answer: worst"),
    *("KL first: median", "first: 90 %", "first: 99 %", "first: worst"),  # a narrow terminal parts them
    *("same first token", "same answer"),
)
_PERIOD_HEAD = (
    "run",
    "level",
    "from",
    "audits",
    "KL answer: median",
    "answer: 90 %",
    "answer: worst",
    "same first token",
    "same answer",
)
_WORST_HEAD = ("run", "level", "KL answer", "KL first", "when", "question")
_FORMATS = {"hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d", "month": "%Y-%m"}
_SECONDS = {"hour": 3600, "day": 86400, "month": 30.4375 * 86400}
_LEAST = 1e-6  # nats: what is nearer than that is rounding, and a logarithmic axis needs some number


def audit_sections(value: Mapping[str, Any]) -> Iterator[Section]:
    """Sections from what `inspect audit --json` gives."""
    runs, period = value["runs"], value["period"]
    text = (
        "Each of these answers was held against full prefill of the same prompt after it had been given. KL: how far "
        "its distributions are from full prefill's, in nats, before the first token and mean over the full answer."
    )
    yield Section(
        "Distribution", (text, told_when(value)), (_distribution(runs),) if runs else (), (audit_table(value),)
    )
    yield Section("Worst questions", tables=(worst_table(value),))
    charts = (_over_time(value),) if any(len(run["periods"]) > 1 for run in runs) else ()
    yield Section("Over time", (f"By {period}, UTC.",), charts, (period_table(value),))


def audit_table(value: Mapping[str, Any]) -> Table:
    """A row a run, level and lead-in; the same in a terminal."""
    return Table(_HEAD, tuple(_row(run) for run in value["runs"]))


def worst_table(value: Mapping[str, Any]) -> Table:
    """The question of each run that was furthest from full prefill; the same in a terminal."""
    return Table(_WORST_HEAD, tuple(_worst(run) for run in value["runs"]))


def period_table(value: Mapping[str, Any]) -> Table:
    """A row a run and period, in the order of time; the same in a terminal."""
    rows = [(run, row) for run in value["runs"] for row in run["periods"]]
    return Table(_PERIOD_HEAD, tuple(_period(run, row, value["period"]) for run, row in rows))


def told_when(value: Mapping[str, Any]) -> str:
    """Return the number of audits and their period, in words."""
    since, until = moment(value["since"]), moment(value["until"])
    return f"{counted(value['questions'], 'audit')}, {since if since == until else f'{since} to {until}'} UTC"


def moment(seconds: int, period: str = "") -> str:
    """A time for people, UTC: to the minute, or as far as a period goes."""
    return time.strftime(_FORMATS.get(period, "%Y-%m-%d %H:%M"), time.gmtime(seconds))


def _row(run: Mapping[str, Any]) -> tuple[object, ...]:
    spreads = [f"{run['spread'][name][at]:.4f}" for name in ("kl_answer", "kl_first") for at in _SPREAD]
    recomputed = f"{run['recomputed_share']:.1%}"
    return (run["run"], _level(run), run["lead_in"], run["count"], recomputed, *spreads, *_agreement(run))


def _worst(run: Mapping[str, Any]) -> tuple[object, ...]:
    worst = run["worst"]
    distances = f"{worst['kl_answer']:.4f}", f"{worst['kl_first']:.4f}"
    return (run["run"], _level(run), *distances, moment(worst["at"]), worst["question"])


def _period(run: Mapping[str, Any], row: Mapping[str, Any], period: str) -> tuple[object, ...]:
    spreads = [f"{row['spread']['kl_answer'][at]:.4f}" for at in ("median", "p90", "max")]
    return (run["run"], _level(run), moment(row["at"], period), row["count"], *spreads, *_agreement(row))


def _agreement(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"{row['top1_agrees']:.1%}", f"{row['answer_equal']:.1%}"


def _level(run: Mapping[str, Any]) -> str:
    return ", ".join(run["levels"]) or "-"


# ---- figures ----


def _distribution(runs: Sequence[Mapping[str, Any]]) -> str:
    shares = (50, 90, 99, 100)
    panels = [
        Panel(
            title,
            tuple(
                Line(
                    name,
                    tuple(
                        (share, max(run["spread"][key][at], _LEAST)) for share, at in zip(shares, _SPREAD, strict=True)
                    ),
                )
                for name, run in _named(runs)
            ),
            logarithmic=True,
        )
        for title, key in (("KL of the answer, nats", "kl_answer"), ("KL of the first token, nats", "kl_first"))
    ]
    return line_charts("So far from full prefill at most", panels, "% of the answers")


def _over_time(value: Mapping[str, Any]) -> str:
    seconds, start = _SECONDS[value["period"]], min(run["periods"][0]["at"] for run in value["runs"])
    panels = [
        Panel(
            title,
            tuple(
                Line(
                    name,
                    tuple(
                        (round((row["at"] - start) / seconds), max(row["spread"]["kl_answer"][at], _LEAST))
                        for row in run["periods"]
                    ),
                )
                for name, run in _named(value["runs"])
            ),
            logarithmic=True,
        )
        for title, at in (("KL of the answer, median, nats", "median"), ("90 %", "p90"))
    ]
    since = f"{value['period']}s since {moment(start, value['period'])}"
    return line_charts("Over time", panels, since, axis="linear")


def _named(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each run with a name of its own: with its level and lead-in where others have the same."""
    names = [run["run"] for run in runs]
    for run in runs:
        alone = names.count(run["run"]) == 1
        yield run["run"] if alone else f"{run['run']}, {_level(run)}, {run['lead_in']}", run
