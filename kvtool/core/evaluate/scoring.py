"""Answer scores as SQuAD defines them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from kvtool.core.common.spelling import normalised

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = set(string.punctuation)


@dataclass(frozen=True, slots=True)
class Scores:
    """Similarity of an answer to the best gold one: token F1, exact match, whether it contains one."""

    f1: float
    exact_match: float
    contains: float

    def to_json(self) -> dict[str, float]:
        """Name the three."""
        return asdict(self)


def normalise(text: str) -> str:
    """Reduce a text to lower case without punctuation, articles and double spaces (SQuAD 1.1 evaluation)."""
    text = normalised("NFC", text).lower()
    text = "".join(char for char in text if char not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def score(answer: str, gold: Iterable[str]) -> Scores:
    """Score one answer against all accepted ones."""
    said = normalise(answer)
    wanted = [normalise(text) for text in gold]
    return Scores(
        max((_f1(said, text) for text in wanted), default=0.0),
        float(said in wanted),
        float(any(text and text in said for text in wanted)),
    )


def _f1(said: str, wanted: str) -> float:
    a, b = said.split(), wanted.split()
    common = sum((Counter(a) & Counter(b)).values())
    if not a or not b:
        return float(a == b)
    return 2 * common / (len(a) + len(b))
