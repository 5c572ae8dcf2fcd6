"""Tables of `kvtool eval`: runs, their comparison question by question, and the choice of one on half the questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvtool.core.fusion.selectors import REFERENCE
from kvtool.reports.page import Shown, Table
from kvtool.reports.report import NO_CONTEXT

_AGREEMENT = ("top1_agrees", "answer_equal")


def read_at(value: Mapping[str, Any]) -> str:
    return f"chunks read at level {', '.join(value['levels'])}" if value["levels"] else "no chunk read"


def evidence(value: Mapping[str, Any]) -> Iterator[Shown]:
    if len(value["runs"]) > 1:
        yield from (_paired_table(value), _paired_text(value))
    if value.get("holdout"):
        yield from (_holdout_table(value["holdout"]), _holdout_text(value["holdout"]))


def runs_table(value: Mapping[str, Any]) -> Table:
    head = (
        *("run", "n", "F1", "of full", "contains", "KL first", "KL answer", "same first", "same answer"),
        *("recomputed", "TTFT ms", "speedup", "Pareto"),
    )
    rows = (
        (
            row["run"],
            row["count"],
            *(with_interval(row, name) for name in ("f1", "f1_ratio", "contains", "kl_first", "kl_answer")),
            *(_percent(row, name) for name in _AGREEMENT),
            "-" if row["run"] == NO_CONTEXT else _percent(row, "recomputed_share"),
            f"{row['ttft_ms_median']:.0f}",
            f"{row['speedup']:.2f}x",
            "*" if row["pareto"] else "",
        )
        for row in value["runs"]
    )
    return Table(head, tuple(rows), "all runs")


def _percent(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name]:.1%}" if name in row else "-"


def with_interval(row: Mapping[str, Any], name: str, sign: str = "") -> str:
    if row.get(name) is None:
        return "-"
    if row["intervals"][name] is None:
        return f"{row[name]:{sign}.3f} (n = 1)"
    low, high = row["intervals"][name]
    return f"{row[name]:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def _paired_table(value: Mapping[str, Any]) -> Table:
    runs = [row for row in value["runs"] if row["run"] != REFERENCE]
    base = value["kl_base"]
    numbers = (
        *(("F1 - full", "f1_difference", "+"), ("contains - full", "contains_difference", "+")),
        *(("PGR of F1", "pgr_f1", ""), ("PGR of contains", "pgr_contains", "")),
        *((f"KL answer - {base}", "kl_answer_difference", "+"), (f"KL first - {base}", "kl_first_difference", "+")),
    )
    columns = [(head, [with_interval(row, name, sign) for row in runs]) for head, name, sign in numbers]
    columns += [
        (f"full {which}: n, F1, contains", [_scores(row.get(f"full_{which}")) for row in runs])
        for which in ("right", "wrong")
    ]
    known = [(head, cells) for head, cells in columns if set(cells) - {"-"}]
    names = [row["run"] for row in runs]
    rows = zip(names, *(cells for _, cells in known), strict=True)
    return Table(("run", *(head for head, _ in known)), tuple(rows), "question by question")


def _scores(some: Mapping[str, Any] | None) -> str:
    if not some:
        return "-"
    return ", ".join([str(some["count"]), *(f"{some[name]:.3f}" for name in ("f1", "contains") if name in some)])


def _paired_text(value: Mapping[str, Any]) -> str:
    return (
        f"Paired by question, {value['resamples']:,} resamples. PGR: the share of the gap between no context and full "
        "that a run recovers (KVShareArena, arXiv 2609.10266), for which --no-context is needed; a dash: the gap is "
        "not above 0 in 95 % of the resamples. Full right, full wrong: the questions that full prefill's answer "
        "contains a gold answer to, and the others (BoxOffice, arXiv 2609.31415): n, F1, contains."
    )


def _holdout_table(chosen: Mapping[str, Any]) -> Table:
    head = (
        *("rule", "run", "half", "n", "recomputed", "KL answer", "KL first", "F1 - full", "contains - full"),
        *("same first", "same answer"),
    )
    rows: list[tuple[object, ...]] = []
    for rule in chosen["rules"]:
        if rule["run"] is None:
            rows.append((rule["rule"], "none does", *("-",) * (len(head) - 2)))
            continue
        rows += [
            (
                *(rule["rule"], rule["run"], half, row["count"], _percent(row, "recomputed_share")),
                *(with_interval(row, name) for name in ("kl_answer", "kl_first")),
                *(with_interval(row, name, "+") for name in ("f1_difference", "contains_difference")),
                *(_percent(row, name) for name in _AGREEMENT),
            )
            for half, row in (("first, chosen on", rule["selection"]), ("second", rule["held_out"]))
        ]
    return Table(head, tuple(rows), "chosen on one half")


def _holdout_text(chosen: Mapping[str, Any]) -> str:
    left_out = f" Not weighed, since some questions lack them: {', '.join(chosen['excluded'])}."
    return (
        "Chosen on the first half of the questions in the file's order. nearest: the lowest mean KL of the answer "
        f"among the runs that recompute at most {chosen['max_recomputed']:.0%} of the cached tokens, in whole "
        "percents. cheapest: the least recompute among the runs whose KL of the answer is at most "
        f"{chosen['max_kl']:g} nats by the upper end of its 95 % interval." + (left_out if chosen["excluded"] else "")
    )
