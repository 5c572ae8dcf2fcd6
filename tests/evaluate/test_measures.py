"""Measures of an answer: means over those that have them, SQuAD scores, and KL by its definition."""

from __future__ import annotations

import math

import pytest
import torch

from kvtool.core.evaluate.measures import SCORES, means, medians, normalise, numbers_of, score
from kvtool.core.evaluate.reference import kl_of_logits

ROWS = [{"f1": 1.0, "top1_agrees": True}, {"f1": 0.0, "ms": 4}, {"top1_agrees": False, "ms": 2, "answer": "x"}]


def test_a_row_counts_where_it_has_the_number() -> None:
    assert numbers_of(ROWS, "ms") == [4.0, 2.0]
    assert means(ROWS) == {"f1": 0.5, "top1_agrees": 0.5}
    assert means(ROWS, ("ms", "nothing")) == {"ms": 3.0}
    assert medians(ROWS, ("ms", "f1", "nothing")) == {"ms": 3.0, "f1": 0.5}
    assert means([]) == {}


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
    assert found == pytest.approx(dict(zip(SCORES, expected, strict=True)))


def test_the_best_gold_answer_counts_for_each_score() -> None:
    found = score("the old mill on the river", ["old mill river", "mill"])
    assert found["f1"] == pytest.approx(2 * 3 / (4 + 3))
    assert found["contains"] == 1.0


def divergence(p: torch.Tensor, q: torch.Tensor) -> list[float]:
    return kl_of_logits(p, q).tolist()


def test_kl_is_what_its_definition_says() -> None:
    p, q = [0.5, 0.25, 0.25], [0.2, 0.3, 0.5]
    direct = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    logits_p, logits_q = torch.tensor([p]).log() + 3.0, torch.tensor([q]).log() - 1.0  # any constant
    assert divergence(logits_p, logits_q) == pytest.approx([direct], rel=1e-6)
    assert divergence(logits_q, logits_p) != pytest.approx([direct], rel=1e-2)
    both = torch.cat([logits_p, logits_p]), torch.cat([logits_q, logits_p])
    assert divergence(*both) == pytest.approx([direct, 0], rel=1e-6, abs=1e-12)


def test_kl_of_the_same_and_of_far_apart() -> None:
    logits = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)) * 20
    assert divergence(logits, logits) == pytest.approx([0] * 4, abs=1e-12)
    assert min(divergence(logits, logits.flip(0))) > 1
    assert math.isfinite(*divergence(torch.tensor([[0.0, 900.0]]), torch.tensor([[900.0, 0.0]])))


def test_rows_do_not_matter_to_one_another() -> None:
    random = torch.Generator().manual_seed(1)
    p, q = (torch.randn(37, 64, generator=random) * 5 for _ in range(2))
    assert torch.equal(
        kl_of_logits(p, q), torch.cat([kl_of_logits(*rows) for rows in zip(p[:, None], q[:, None], strict=True)])
    )
