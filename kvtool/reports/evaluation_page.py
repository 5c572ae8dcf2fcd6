"""Page of `kvtool eval`: figure of the modes by how much they recompute, tables of runs and of their comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtool.core.common.sizes import counted
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.reports.charts import Line, Panel, line_charts
from kvtool.reports.page import Section, Table
from kvtool.reports.report import (
    NO_CONTEXT,
)

_AGREEMENT = ("top1_agrees", "answer_equal")


def read_at(value: Mapping[str, Any]) -> str:
    return f"chunks read at level {', '.join(value['levels'])}" if value["levels"] else "no chunk read"


def evaluation_sections(value: Mapping[str, Any], about: str) -> Iterator[Section]:
    text = (
        "KL: how far a run's distributions are from full recompute's, in nats, before the first token and mean over "
        "the full answer; in brackets the 95 % interval over questions. Pareto: no other run recomputes less and is "
        "nearer to full."
    )
    yield Section("Distance against recompute", (text,), _figures(value, about))
    yield Section("All runs", tables=(_runs_table(value),))
    yield from evidence(value)


def evidence(value: Mapping[str, Any]) -> Iterator[Section]:
    if len(value["runs"]) > 1:
        yield Section("Question by question", (_paired_text(value),), tables=(paired_table(value),))
    if value.get("holdout"):
        yield Section(
            "Chosen on one half", (_holdout_text(value["holdout"]),), tables=(_holdout_table(value["holdout"]),)
        )


# ---- the figure ----


def _figures(value: Mapping[str, Any], about: str) -> tuple[str, ...]:
    found = {row["run"]: row for row in value["runs"]}
    runs = [row for name, row in found.items() if name not in (REFERENCE, NO_CONTEXT)]
    if not runs:
        return ()
    levels = ((REFERENCE, "full"), (NO_CONTEXT, "no context"))
    scores = tuple((label, found[run]["f1"]) for run, label in levels if "f1" in found.get(run, {}))
    panels = [
        Panel(title, tuple(_by_variant(runs, name)), levels=across)
        for title, name, across in (("KL of the answer, nats", "kl_answer", ()), ("F1", "f1", scores))
        if any(name in row for row in runs)
    ]
    note = f"with 95 % intervals over {counted(value['questions'], 'question')}; hollow: a variant of the mode"
    title = f"Modes by how much they recompute: {about}"
    return (line_charts(title, panels, "% of the cached tokens recomputed", note, "linear"),)


def _by_variant(runs: Sequence[Mapping[str, Any]], name: str) -> Iterator[Line]:
    """Yield the points of each mode and variant; shares are rounded, so that equal ratios have one place."""
    found: dict[str, dict[float, Mapping[str, Any]]] = {}
    for row in runs:
        if name in row:
            found.setdefault(row["run"].partition(":")[0], {})[round(100 * row["recomputed_share"])] = row
    for variant, of_share in found.items():
        mode, *changes = variant.split("+")
        rows = sorted(of_share.items())
        points = tuple((share, row[name]) for share, row in rows)
        bounds = tuple(tuple(row["intervals"][name] or (row[name],) * 2) for _, row in rows)
        label = ", ".join([mode, *(f"no {change[:-3]}" if change.endswith("=no") else change for change in changes)])
        yield Line(label, points, bounds, mode if changes else "")


# ---- tables ----


def _runs_table(value: Mapping[str, Any]) -> Table:
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
    return Table(head, tuple(rows))


def _percent(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name]:.1%}" if name in row else "-"


def with_interval(row: Mapping[str, Any], name: str, sign: str = "") -> str:
    if row.get(name) is None:
        return "-"
    if row["intervals"][name] is None:
        return f"{row[name]:{sign}.3f} (n = 1)"
    low, high = row["intervals"][name]
    return f"{row[name]:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def paired_table(value: Mapping[str, Any]) -> Table:
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
    return Table(("run", *(head for head, _ in known)), tuple(zip(names, *(cells for _, cells in known), strict=True)))


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
    return Table(head, tuple(rows))


def _holdout_text(chosen: Mapping[str, Any]) -> str:
    left_out = f" Not weighed, since some questions lack them: {', '.join(chosen['excluded'])}."
    return (
        "Chosen on the first half of the questions in the file's order. nearest: the lowest mean KL of the answer "
        f"among the runs that recompute at most {chosen['max_recomputed']:.0%} of the cached tokens, in whole "
        "percents. cheapest: the least recompute among the runs whose KL of the answer is at most "
        f"{chosen['max_kl']:g} nats by the upper end of its 95 % interval." + (left_out if chosen["excluded"] else "")
    )
