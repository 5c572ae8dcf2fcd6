"""Measures of an answer: their names in all commands, and means over many answers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SCORES = ("f1", "exact_match", "contains")  # against gold answers; `scoring`
DISTANCES = ("kl_first", "kl_answer", "top1_agrees", "answer_equal")  # from a reference's answer; `reference`
MEASURES = (*SCORES, *DISTANCES)

Row = Mapping[str, Any]


def numbers_of(rows: Sequence[Row], name: str) -> list[float]:
    """Collect one number of every row that has it; yes counts 1."""
    return [float(row[name]) for row in rows if name in row]


def means(rows: Sequence[Row], names: Iterable[str] = MEASURES) -> dict[str, float]:
    """Average each number over the rows that have it; what no row has is left out."""
    return {name: statistics.fmean(numbers) for name in names if (numbers := numbers_of(rows, name))}


def medians(rows: Sequence[Row], names: Iterable[str]) -> dict[str, float]:
    """Take the median of each number over the rows that have it; what no row has is left out."""
    return {name: statistics.median(numbers) for name in names if (numbers := numbers_of(rows, name))}
