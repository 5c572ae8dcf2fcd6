"""Scores as SQuAD's own script computes them, and KL."""

from __future__ import annotations

import math

import pytest
import torch

from kvtool.core.evaluate.scoring import Scores, kl, mean, normalise, score


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Quick, brown fox!", "quick brown fox"),
        ("an apple a day", "apple day"),
        ("A-ha and the end.", "aha and end"),
        ("theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("  \n", ""),
        ("the", ""),
        ("1,874", "1874"),
        ("Café", "café"),
        ("Cafe\u0301", "café"),
        ("서울, 대한민국", "서울 대한민국"),
    ],
)
def test_normalise(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("The mill.", ["mill"], (1.0, 1.0, 1.0)),
        ("It was the old mill", ["mill"], (0.4, 0.0, 1.0)),  # it was old mill: precision 1/4, recall 1
        ("old mill", ["the old mill on the river"], (2 * 2 / (2 + 4), 0.0, 0.0)),
        ("river river", ["river"], (2 / 3, 0.0, 1.0)),
        ("no", ["yes"], (0.0, 0.0, 0.0)),
        ("mill", ["river", "Mill"], (1.0, 1.0, 1.0)),
        ("", ["mill"], (0.0, 0.0, 0.0)),
        ("the", ["a"], (1.0, 1.0, 0.0)),  # both say nothing; nothing is contained in no answer
        ("mill", [], (0.0, 0.0, 0.0)),
        ("1874년에 완성되었다", ["1874년"], (0.0, 0.0, 1.0)),
    ],
)
def test_score(answer: str, gold: list[str], expected: tuple[float, float, float]) -> None:
    found = score(answer, gold)
    assert isinstance(found, Scores)
    assert (found.f1, found.exact_match, found.contains) == pytest.approx(expected)


def test_the_best_gold_answer_counts_for_each_score() -> None:
    found = score("the old mill on the river", ["old mill river", "mill"])
    assert found.f1 == pytest.approx(2 * 3 / (4 + 3))
    assert found.contains == 1.0


def test_kl_is_what_its_definition_says() -> None:
    p, q = [0.5, 0.25, 0.25], [0.2, 0.3, 0.5]
    direct = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    logits_p, logits_q = torch.tensor([p]).log() + 3.0, torch.tensor([q]).log() - 1.0  # any constant
    assert kl(logits_p, logits_q) == pytest.approx(direct, rel=1e-6)
    assert kl(logits_q, logits_p) != pytest.approx(direct, rel=1e-2)
    both = torch.cat([logits_p, logits_p]), torch.cat([logits_q, logits_p])
    assert kl(*both) == pytest.approx(direct / 2, rel=1e-6)


def test_kl_of_the_same_and_of_far_apart() -> None:
    logits = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)) * 20
    assert kl(logits, logits) == pytest.approx(0, abs=1e-12)
    assert kl(logits, logits.flip(0)) > 1
    assert math.isfinite(kl(torch.tensor([[0.0, 900.0]]), torch.tensor([[900.0, 0.0]])))


def test_mean() -> None:
    assert mean([1.0, 2.0]) == 1.5
    assert mean([]) is None
