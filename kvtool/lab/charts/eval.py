"""The evaluation of one's own documents for people: its table and its words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvtool.core.common.sizes import counted
from kvtool.lab.charts.page import Table
from kvtool.lab.charts.quality import with_interval

_HEAD = ("mode", "F1", "contains", "KL answer", "recomputed", "TTFT ms", "sooner")

_FEW = 20  # questions, below which the bootstrap's intervals are known to be too narrow


def own_table(value: Mapping[str, Any]) -> Table:
    """A mode a row; in brackets the 95 % interval over questions, or that there is but one."""
    return Table(_HEAD, tuple(_row(row) for row in value["runs"]))


def _row(row: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        row["run"],
        *(with_interval(row, name) for name in ("f1", "contains", "kl_answer")),
        f"{row['recomputed_share']:.0%}",
        f"{row['ttft_ms_median']:.0f}",
        f"{row['speedup']:.2f}x",
    )


def own_text(value: Mapping[str, Any]) -> Iterator[str]:
    """Describe retrieval's results, the mode to use, and the reservations about both."""
    found = value.get("retrieval")
    if found:
        yield (
            f"retrieval: {with_interval(found, 'recall')} of the expected sources were found, for "
            f"{counted(found['count'], 'question')}; {found['complete']:.0%} of them have all of theirs, and the mean "
            f"reciprocal rank is {found['reciprocal_rank']:.2f}"
        )
    yield _advice(value["best"], value["max_kl"])
    if value["questions"] == 1:
        yield "1 question, which says nothing about others"
    elif value["questions"] < _FEW:
        yield f"{counted(value['questions'], 'question')}: the intervals of fewer than {_FEW} are too narrow"
    if value["made"]:
        yield (
            f"{counted(value['made'], 'question')} of {value['questions']} were written by a model from the passages "
            "that answer them: people's questions are found less well"
        )
    if value["with_holes"]:
        lacking = counted(value["with_holes"], "question")
        yield f"{lacking} lacked chunks of the store: what they say of reuse is too good"


def _advice(best: Mapping[str, Any], max_kl: float) -> str:
    if best["run"] is None:
        return "no mode but full prefill was asked for"
    near = f"the answer's KL is at most {max_kl:g} nats by the upper end of its interval"
    if best["near"]:
        return f"take {best['run']}: it recomputes the least of the modes for which {near}"
    return f"no mode is so near to full prefill that {near}; the nearest is {best['run']} (--max-kl accepts more)"


def made_table(value: Mapping[str, Any]) -> Table:
    """The questions that were written."""
    rows = [(row["question"], "".join(row["answers"][:1]) or "-", row["sources"][0]) for row in value["written"]]
    return Table(("question", "answer", "source"), tuple(rows))
