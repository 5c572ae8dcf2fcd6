"""Tables of `kvtool eval`: runs, their comparison question by question, and the choice of one on half the questions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvtool.core.fusion.selectors import REFERENCE
from kvtool.reports.page import Shown, Table
from kvtool.reports.report import NO_CONTEXT

_ESTIMATES = {
    **{"F1": "f1", "of full": "f1_ratio", "contains": "contains", "KL first": "kl_first", "KL answer": "kl_answer"},
    **{"F1 - full": "f1_difference", "contains - full": "contains_difference"},
    **{"PGR of F1": "pgr_f1", "PGR of contains": "pgr_contains"},
}
_NUMBERS = {
    **{"recomputed": ("recomputed_share", ".1%"), "TTFT ms": ("ttft_ms_median", ".0f"), "speedup": ("speedup", ".2f")},
    **{"same first": ("top1_agrees", ".1%"), "same answer": ("answer_equal", ".1%")},
}
SHORT = ("run", "F1", "contains", "KL answer", "recomputed", "TTFT ms", "speedup")
_RUNS = (
    *("run", "n", "F1", "of full", "contains", "KL first", "KL answer", "same first", "same answer"),
    *("recomputed", "TTFT ms", "speedup", "Pareto"),
)
_RIGHT, _WRONG = ("full right: n, F1, contains", "full wrong: n, F1, contains")
_HALVES = (
    *("rule", "run", "half", "n", "recomputed", "KL answer", "KL first", "F1 - full", "contains - full"),
    *("same first", "same answer"),
)


def read_at(value: Mapping[str, Any]) -> str:
    return f"chunks read at level {', '.join(value['levels'])}" if value["levels"] else "no chunk read"


def evidence(value: Mapping[str, Any]) -> Iterator[Shown]:
    if len(value["runs"]) > 1:
        yield _paired_table(value)
        yield f"Paired by question, {value['resamples']:,} resamples; `kvtool help concepts` explains the columns"
    if value.get("holdout"):
        yield from (_holdout_table(value["holdout"]), _holdout_text(value["holdout"]))


def with_interval(row: Mapping[str, Any], name: str) -> str:
    if row.get(name) is None:
        return "-"
    sign = "+" if name.endswith("_difference") else ""
    if row["intervals"][name] is None:
        return f"{row[name]:{sign}.3f} (n = 1)"
    low, high = row["intervals"][name]
    return f"{row[name]:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def runs_table(value: Mapping[str, Any], head: tuple[str, ...] = _RUNS) -> Table:
    return _table(head, map(_cells, value["runs"]))


def _table(head: tuple[str, ...], rows: Iterable[Mapping[str, str]], title: str = "") -> Table:
    return Table(head, tuple(tuple(cells.get(name, "-") for name in head) for cells in rows), title)


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Make the cells of all tables that show a run, by their heads."""
    cells = {head: with_interval(row, name) for head, name in _ESTIMATES.items()}
    cells |= {head: f"{row[name]:{form}}" for head, (name, form) in _NUMBERS.items() if name in row}
    cells |= {_RIGHT: _scores(row.get("full_right")), _WRONG: _scores(row.get("full_wrong"))}
    if row.get("run") == NO_CONTEXT:
        del cells["recomputed"]
    return cells | {"run": row.get("run", ""), "n": str(row["count"]), "Pareto": "*" if row.get("pareto") else ""}


def _scores(scores: Mapping[str, Any] | None) -> str:
    if not scores:
        return "-"
    return ", ".join([str(scores["count"]), *(f"{scores[name]:.3f}" for name in ("f1", "contains") if name in scores)])


def _paired_table(value: Mapping[str, Any]) -> Table:
    distances = {f"KL {of} - {value['kl_base']}": f"kl_{of}_difference" for of in ("answer", "first")}
    rows = [
        _cells(row) | {head: with_interval(row, name) for head, name in distances.items()}
        for row in value["runs"]
        if row["run"] != REFERENCE
    ]
    names = ("F1 - full", "contains - full", "PGR of F1", "PGR of contains", *distances, _RIGHT, _WRONG)
    known = [name for name in names if any(cells[name] != "-" for cells in rows)]
    return _table(("run", *known), rows, "question by question")


def _holdout_table(chosen: Mapping[str, Any]) -> Table:
    rows: list[dict[str, str]] = []
    for rule in chosen["rules"]:
        names = {"rule": rule["rule"], "run": rule["run"] or "none does"}
        halves = {"first, chosen on": rule["selection"], "second": rule["held_out"]}
        rows += [_cells(row) | names | {"half": half} for half, row in halves.items() if row] or [names]
    return _table(_HALVES, rows, "chosen on one half")


def _holdout_text(chosen: Mapping[str, Any]) -> str:
    left_out = f"; not weighed, since some questions lack them: {', '.join(chosen['excluded'])}"
    return (
        f"nearest: at most {chosen['max_recomputed']:.0%} recomputed; cheapest: KL of the answer at most "
        f"{chosen['max_kl']:g} nats" + (left_out if chosen["excluded"] else "")
    )
