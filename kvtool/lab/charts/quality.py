"""The quality report for people: sections of a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvtool.core.common.sizes import counted
from kvtool.lab.charts.page import Section, Table
from kvtool.lab.charts.svg import Line, Panel, line_charts
from kvtool.lab.measure.trial import NO_CONTEXT

_HEAD = (
    *("run", "n", "F1", "of full", "contains", "KL first", "KL answer", "same first", "same answer"),
    *("recomputed", "TTFT ms", "speedup", "Pareto"),
)
_HOLDOUT_HEAD = (
    *("rule", "run", "half", "n", "recomputed", "KL answer", "KL first", "F1 - full", "contains - full"),
    *("same first", "same answer"),
)


def quality_sections(value: dict[str, Any], about: str) -> list[Section]:
    """Sections from what `inspect quality --json` gives; `about`: the model and the questions, for the figure."""
    text = (
        "KL: how far a run's distributions are from full recompute's, in nats, before the first token and mean over "
        "the full answer; in brackets the 95 % interval over questions. Pareto: no other run recomputes less and is "
        "nearer to full."
    )
    sections = [
        Section("Distance against recompute", (text,), _figures(value, about)),
        Section("All runs", tables=(quality_table(value),)),
    ]
    if len(value["runs"]) > 1:
        sections.append(Section("Question by question", (paired_text(value),), tables=(paired_table(value),)))
    if value.get("holdout"):
        sections.append(Section("Chosen on one half", (holdout_text(value),), tables=(holdout_table(value),)))
    return sections


# ---- the figure ----


def _figures(value: Mapping[str, Any], about: str) -> tuple[str, ...]:
    """Draw the figure, if any run stands beside full recompute."""
    beside = {row["run"] for row in value["runs"]} - {value["reference"], NO_CONTEXT}
    return (_charts(value, about),) if beside else ()


def _charts(value: Mapping[str, Any], about: str) -> str:
    """Draw KL and F1 against what is recomputed; F1 of full and of no context are lines across."""
    found = {row["run"]: row for row in value["runs"]}
    runs = [row for name, row in found.items() if name not in (value["reference"], NO_CONTEXT)]
    levels = ((value["reference"], "full"), (NO_CONTEXT, "no context"))
    scores = tuple((told, found[run]["f1"]) for run, told in levels if "f1" in found.get(run, {}))
    panels = [
        Panel(title, tuple(_by_variant(runs, name)), levels=beside)
        for title, name, beside in (("KL of the answer, nats", "kl_answer", ()), ("F1", "f1", scores))
        if any(name in row for row in runs)
    ]
    note = f"with 95 % intervals over {counted(value['questions'], 'question')}; hollow: a variant of the mode"
    title = f"Modes by how much they recompute: {about}"
    return line_charts(title, panels, "% of the cached tokens recomputed", note, "linear")


def _by_variant(runs: Sequence[Mapping[str, Any]], name: str) -> Iterator[Line]:
    """Points of each mode, ascending, and of each of its variants beside them; shares are rounded so that modes with
    the same ratio stand at the same place."""
    found: dict[str, dict[float, Mapping[str, Any]]] = {}
    for row in runs:
        if name in row:
            found.setdefault(row["run"].partition(":")[0], {})[round(100 * row["recomputed_share"])] = row
    for variant, of_share in found.items():
        mode, *changes = variant.split("+")
        told = sorted(of_share.items())
        points = tuple((share, row[name]) for share, row in told)
        bounds = tuple(tuple(row["intervals"][name] or (row[name],) * 2) for _, row in told)
        yield Line(_readable(mode, changes), points, bounds, mode if changes else "")


def _readable(mode: str, changes: Sequence[str]) -> str:
    """Write a variant for a legend: `union+shift=no` is `union, no shift`."""
    without = [f"no {change[:-3]}" if change.endswith("=no") else change for change in changes]
    return ", ".join([mode, *without])


# ---- all runs ----


def quality_table(value: Mapping[str, Any]) -> Table:
    """All runs, a row each; the same in a terminal."""
    return Table(_HEAD, tuple(_row(row) for row in value["runs"]))


def _row(row: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        row["run"],
        row["count"],
        *(with_interval(row, name) for name in ("f1", "f1_ratio", "contains", "kl_first", "kl_answer")),
        *_agreement(row),
        "-" if row["run"] == NO_CONTEXT else f"{row['recomputed_share']:.1%}",
        f"{row['ttft_ms_median']:.0f}",
        f"{row['speedup']:.2f}x",
        "*" if row["pareto"] else "",
    )


def _agreement(row: Mapping[str, Any]) -> tuple[str, str]:
    first, answer = (row.get(name) for name in ("top1_agrees", "answer_equal"))
    return "-" if first is None else f"{first:.1%}", "-" if answer is None else f"{answer:.1%}"


def with_interval(row: Mapping[str, Any], name: str, sign: str = "") -> str:
    """A run's number with its interval, or a dash. `sign`: `+` writes that of a number above 0, too."""
    if row.get(name) is None:
        return "-"
    if row["intervals"][name] is None:
        return f"{row[name]:{sign}.3f} (n = 1)"
    low, high = row["intervals"][name]
    return f"{row[name]:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


# ---- question by question ----


def paired_table(value: Mapping[str, Any]) -> Table:
    """Each run beside full prefill, beside no context and beside another run, question by question; the same in a
    terminal. What no run has is left out."""
    runs = [row for row in value["runs"] if row["run"] != value["reference"]]
    columns = [
        ("F1 - full", [with_interval(row, "f1_difference", "+") for row in runs]),
        ("contains - full", [with_interval(row, "contains_difference", "+") for row in runs]),
        ("PGR of F1", [with_interval(row, "pgr_f1") for row in runs]),
        ("PGR of contains", [with_interval(row, "pgr_contains") for row in runs]),
        (f"KL answer - {value['kl_base']}", [with_interval(row, "kl_answer_difference", "+") for row in runs]),
        (f"KL first - {value['kl_base']}", [with_interval(row, "kl_first_difference", "+") for row in runs]),
        ("full right: n, F1, contains", [_apart(row, "full_right") for row in runs]),
        ("full wrong: n, F1, contains", [_apart(row, "full_wrong") for row in runs]),
    ]
    known = [(head, cells) for head, cells in columns if set(cells) - {"-"}]
    names = [row["run"] for row in runs]
    return Table(("run", *(head for head, _ in known)), tuple(zip(names, *(cells for _, cells in known), strict=True)))


def _apart(row: Mapping[str, Any], which: str) -> str:
    some = row.get(which)
    if not some:
        return "-"
    scores = [f"{some[name]:.3f}" for name in ("f1", "contains") if name in some]
    return ", ".join([str(some["count"]), *scores])


def paired_text(value: Mapping[str, Any]) -> str:
    """Explain the columns."""
    return (
        f"Paired by question, {value['resamples']:,} resamples. PGR: the share of the gap between no context and full "
        "that a run recovers (KVShareArena, arXiv 2609.10266), for which --no-context is needed; a dash: the gap is "
        "not above 0 in 95 % of the resamples. Full right, full wrong: the questions that full prefill's answer "
        "contains a gold answer to, and the others (BoxOffice, arXiv 2609.31415): n, F1, contains."
    )


# ---- chosen on one half ----


def holdout_table(value: Mapping[str, Any]) -> Table:
    """Tabulate the choice of each rule on the first half of the questions, with both halves' results."""
    return Table(_HOLDOUT_HEAD, tuple(row for rule in value["holdout"]["rules"] for row in _half_rows(rule)))


def _half_rows(rule: Mapping[str, Any]) -> list[tuple[object, ...]]:
    if rule["run"] is None:
        return [(rule["rule"], "none does", *("-",) * (len(_HOLDOUT_HEAD) - 2))]
    return [
        (
            rule["rule"],
            rule["run"],
            half,
            row["count"],
            f"{row['recomputed_share']:.1%}",
            *(with_interval(row, name) for name in ("kl_answer", "kl_first")),
            *(with_interval(row, name, "+") for name in ("f1_difference", "contains_difference")),
            *_agreement(row),
        )
        for half, row in (("first, chosen on", rule["chosen_on"]), ("second", rule["held_out"]))
    ]


def holdout_text(value: Mapping[str, Any]) -> str:
    """Explain the rules, and name the runs that were left out."""
    found = value["holdout"]
    left_out = f" Not weighed, since some questions lack them: {', '.join(found['left_out'])}."
    return (
        "Chosen on the first half of the questions in the file's order. nearest: the lowest mean KL of the answer "
        f"among the runs that recompute at most {found['max_recomputed']:.0%} of the cached tokens, in whole percents. "
        "cheapest: the least recompute among the runs whose KL of the answer is at most "
        f"{found['max_kl']:g} nats by the upper end of its 95 % interval." + (left_out if found["left_out"] else "")
    )
