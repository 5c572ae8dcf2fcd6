"""Answer scores as SQuAD defines them, and the distance between two models' next-token distributions."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = set(string.punctuation)


@dataclass(frozen=True, slots=True)
class Scores:
    """Best over the gold answers: token F1, exact match, and whether a gold answer stands inside the answer."""

    f1: float
    exact_match: float
    contains: float


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD 1.1 evaluation)."""
    text = unicodedata.normalize("NFC", text).lower()
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


def kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    """KL divergence in nats of softmaxed logits, mean over rows: D(reference ‖ other), both `[rows, vocabulary]`."""
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return sum(values) / len(values) if values else None
