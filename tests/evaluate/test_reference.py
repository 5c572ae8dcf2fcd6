"""KL by its definition. (Answers and distances of whole runs: tests/reports/test_paired_run.py.)"""

from __future__ import annotations

import math

import pytest
import torch

from kvtool.core.evaluate.reference import kl, kl_of_logits


def divergence(p: torch.Tensor, q: torch.Tensor) -> list[float]:
    return kl(p.double().log_softmax(-1), q.double().log_softmax(-1)).tolist()


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
    assert torch.equal(kl_of_logits(p, q), kl(p.double().log_softmax(-1), q.double().log_softmax(-1)))
