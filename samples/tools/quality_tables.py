"""Tables of what `kvtool eval --resume FILE` has measured, a set of questions a file, and of all together.

    python samples/tools/quality_tables.py [--default union:0.15] "HotpotQA, Qwen"=hp.jsonl "MuSiQue, Qwen"=mu.jsonl …

For each file a table of its runs, and one of all questions together, of the runs that every file has. Then what the
default loses against `full`, separately for questions that `full` answers rightly and wrongly. Brackets hold 95 %
intervals of 10,000 bootstrap resamples, drawn in pairs, question by question. Of a file only the questions count that
every one of its runs has answered.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.evaluate.measures import numbers_of
from kvtool.core.fusion.selectors import REFERENCE
from kvtool.reports.summary import interval, summarise

ALL = "all together"
RUN_HEAD = (
    *("run", "rows", "KL answer", "less the default's", "KL first token", "F1", "less full's"),
    *("contains", "less full's", "same first token", "same answer"),
)
LOSS_HEAD = (
    *("set", "questions", "F1 less full's", "contains less full's", "where full is right: contains"),
    *("where it is wrong", "same first token", "same answer", "KL answer"),
)

Rows = Mapping[int, Mapping[str, Mapping[str, Any]]]  # of a question's place, and of a run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", metavar="NAME=FILE", help="what --resume has kept, and how it is called")
    parser.add_argument("--default", default="union:0.15", help="the run that is held against full (union:0.15)")
    options = parser.parse_args()
    sets = {name: whole(read(Path(path))) for name, _, path in (text.partition("=") for text in options.sets)}
    if len(sets) > 1:
        sets[ALL] = together(list(sets.values()))
    for name, rows in sets.items():
        print(f"{name}: {len(rows)} questions\n")
        print_table(RUN_HEAD, (run_cells(summary) for summary in summarise(rows, options.default)))
    print_table(LOSS_HEAD, (loss_cells(name, rows, options.default) for name, rows in sets.items()))


# ---- what was measured ----


def read(path: Path) -> Rows:
    """The rows of every question's runs; the first of a run counts, and what a kill has torn is passed over."""
    found: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").split("\n")[1:-1]:
        value = json.loads(line)
        known = found.setdefault(value["index"], {})
        found[value["index"]] = {**value["runs"], **known}
    return found


def whole(rows: Rows) -> Rows:
    """The questions that every run has answered."""
    runs = {run for of_question in rows.values() for run in of_question}
    return {place: of_question for place, of_question in sorted(rows.items()) if runs <= of_question.keys()}


def together(sets: Sequence[Rows]) -> Rows:
    """All questions of all sets, with the runs that every one of them has."""
    every = [of_question for rows in sets for of_question in rows.values()]
    shared = set.intersection(*(set(of_question) for of_question in every)) if every else set()
    return {place: {run: row for run, row in one.items() if run in shared} for place, one in enumerate(every)}


# ---- cells ----


def run_cells(summary: Mapping[str, Any]) -> Iterator[str]:
    yield f"`{summary['run']}`"
    yield f"{summary['recomputed_share']:.1%}"
    for name in ("kl_answer", "kl_answer_difference"):
        yield told(summary, name)
    yield plain(summary["kl_first"])
    yield plain(summary["f1"])
    yield told(summary, "f1_difference")
    yield plain(summary["contains"])
    yield told(summary, "contains_difference")
    yield from agreement(summary)


def loss_cells(name: str, rows: Rows, default: str) -> Iterator[str]:
    own = next(summary for summary in summarise(rows) if summary["run"] == default)
    yield name
    yield str(len(rows))
    for key in ("f1_difference", "contains_difference"):
        yield told(own, key)
    for right in (1, 0):
        yield apart([one[default] for one in rows.values() if one[REFERENCE].get("contains") == right])
    yield from agreement(own)
    yield told(own, "kl_answer")


def apart(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the share of these answers that contain a gold one, with its interval."""
    scores = numbers_of(rows, "contains")
    if not scores:
        return ""
    low, high = interval(scores) or (0.0, 0.0)
    return f"{plain(sum(scores) / len(scores))} [{plain(low)}, {plain(high)}] of {len(scores)}"


def agreement(summary: Mapping[str, Any]) -> Iterator[str]:
    for name in ("top1_agrees", "answer_equal"):
        yield f"{summary[name]:.0%}"


def told(summary: Mapping[str, Any], name: str) -> str:
    """A number with its interval; differences have a sign."""
    if summary.get(name) is None:
        return ""
    sign = "+" if "difference" in name else ""
    low, high = summary["intervals"][name]
    return f"{plain(summary[name], sign)} [{plain(low, sign)}, {plain(high, sign)}]"


def plain(value: float, sign: str = "") -> str:
    """Three decimals, without the zero before them."""
    return f"{value:{sign}.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:{sign}.3f}"


def print_table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> None:
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


if __name__ == "__main__":
    main()
