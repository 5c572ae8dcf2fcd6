"""Measures of an answer, and audits: given answers compared with full prefill, kept next to the store."""

from __future__ import annotations

import re
import statistics
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvtool.core.common.spelling import normalised

SCORES = ("f1", "exact_match", "contains")  # against gold answers; `scoring`
DISTANCES = ("kl_first", "kl_answer", "top1_agrees", "answer_equal")  # from a reference's answer; `reference`
MEASURES = (*SCORES, *DISTANCES)

Row = Mapping[str, Any]


def numbers_of(rows: Sequence[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows if name in row]


def means(rows: Sequence[Row], names: Iterable[str] = MEASURES) -> dict[str, float]:
    return {name: statistics.fmean(numbers) for name in names if (numbers := numbers_of(rows, name))}


def medians(rows: Sequence[Row], names: Iterable[str]) -> dict[str, float]:
    return {name: statistics.median(numbers) for name in names if (numbers := numbers_of(rows, name))}


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = set(string.punctuation)


def normalise(text: str) -> str:
    """Reduce a text to lower case without punctuation, articles and double spaces (SQuAD 1.1 evaluation)."""
    text = normalised("NFC", text).lower()
    text = "".join(char for char in text if char not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def score(answer: str, gold: Iterable[str]) -> dict[str, float]:
    """Return the SCORES of an answer against the gold ones, of each the best."""
    said = normalise(answer)
    wanted = [normalise(text) for text in gold]
    return {
        "f1": max((_f1(said, text) for text in wanted), default=0.0),
        "exact_match": float(said in wanted),
        "contains": float(any(text and text in said for text in wanted)),
    }


def _f1(said: str, wanted: str) -> float:
    a, b = said.split(), wanted.split()
    common = sum((Counter(a) & Counter(b)).values())
    if not a or not b:
        return float(a == b)
    return 2 * common / (len(a) + len(b))


def run_name(mode: str, changes: Iterable[tuple[str, Any]], amount: float | None) -> str:
    variant = "+".join([mode, *(f"{name}={_text(value)}" for name, value in changes)])
    return variant if amount is None else f"{variant}:{amount:.12g}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.12g}" if isinstance(value, float) else str(value)
