"""Deviation of reused KV and of attention, against full prefill and eager attention by unmodified `transformers`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kvtool.core.errors import UsageError
from kvtool.core.fusion.plan import Plan
from kvtool.reports import kv_deviation
from kvtool.reports.kv_deviation import (
    CHOICES,
    METRICS,
    attention_deviation,
    chosen_rows,
    deviation,
    deviation_report,
    spearman,
    top_share,
)
from kvtool.reports.reused_prompt import ReusedPrompt
from tests.fusion.making import BOS, CHUNKS, NAMES, PREFIX, Case, case, plain_rows
from tests.reports.plain import attention_of, past_of


def subject_of(one: Case, plan: Plan | None = None) -> ReusedPrompt:
    return ReusedPrompt.of(one.decoder, plan or one.plan(lead_in=BOS), one.source)


@pytest.mark.parametrize("name", NAMES)
def test_the_metrics_are_those_of_full_prefill(name: str) -> None:
    one = case(name)
    plan = one.plan(lead_in=BOS)
    subject = subject_of(one, plan)
    reused = subject.recomputing(torch.zeros(plan.length, dtype=torch.bool))
    found = deviation(subject, reused, subject.full())
    exact = plain_rows(one.name, one.dtype, tuple(plan.ids), 0)
    assert subject.hits.tolist() == list(range(plan.chunks[0].start, plan.chunks[-1].stop))
    for layer, buffer in enumerate(reused.buffers):
        pairs = zip((buffer.keys, buffer.values), exact[layer], strict=True)
        k, v = (mine[0][:, subject.hits] - own[0][:, subject.hits] for mine, own in pairs)
        wanted = {"v_sse": (v**2).sum((0, 2)), "k_sse": (k**2).sum((0, 2)), "k_l1": k.abs().sum((0, 2))}
        wanted["kv_sse"] = wanted["v_sse"] + wanted["k_sse"]
        for metric in METRICS:
            assert torch.allclose(found.by_metric[metric][layer], wanted[metric], atol=3e-5, rtol=1e-4)
    assert found.by_metric["v_sse"][0].max() < 1e-8  # layer 0 depends only on the embedding
    assert found.by_metric["v_sse"][1:].mean() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_attention_deviates_as_eager_attention_says(name: str) -> None:
    one = case(name)
    plan = one.plan(lead_in=BOS)
    subject = subject_of(one, plan)
    full = subject.full()
    chosen = torch.zeros(plan.length, dtype=torch.bool)
    chosen[subject.hits[::7]] = True
    cache = subject.recomputing(chosen)
    ours = attention_deviation(cache, subject.queries(cache), full, subject.queries(full))
    exact = plain_rows(one.name, one.dtype, tuple(plan.ids), 0)
    start, reused = plan.segments[-1].start, [(buffer.keys, buffer.values) for buffer in cache.buffers]
    layers = one.decoder.stored_layers
    right, wrong = (
        attention_of(one, plan.ids[start:], past_of(one, sides[:layers], start)) for sides in (exact, reused)
    )
    wanted = [float((a - b).norm() / b.norm()) for a, b in zip(wrong, right, strict=True)]
    assert ours == pytest.approx(wanted, abs=1e-5)
    assert max(ours) > 1e-3


@pytest.mark.parametrize("choice", CHOICES)
def test_the_rows_of_a_choice(choice: str) -> None:
    subject = subject_of(case("llama"))
    worth = torch.arange(len(subject.hits), 0.0, -1)
    for ratio in (0.0, 0.15, 1.0):
        chosen = chosen_rows(subject, choice, ratio, worth)
        assert int(chosen.sum()) == math.ceil(round(ratio * len(subject.hits), 6))
        assert set(chosen.nonzero()[:, 0].tolist()) <= set(subject.hits.tolist())
    few = chosen_rows(subject, choice, 0.15, worth).nonzero()[:, 0].tolist()
    if choice == "hkvd":
        assert few == subject.hits[: len(few)].tolist()
    if choice == "first":
        depth = {at: number for one in subject.plan.chunks for number, at in enumerate(range(one.start, one.stop))}
        left = set(subject.hits.tolist()) - set(few)
        assert max(depth[at] for at in few) <= min(depth[at] for at in left)


def test_spearman_and_shares_by_hand() -> None:
    dice = np.random.default_rng(0)
    a, b = dice.normal(size=40), dice.integers(0, 9, 40).astype(float)

    def ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.array([(values < own).sum() + ((values == own).sum() - 1) / 2 for own in values])

    wanted = np.corrcoef(ranks(a), ranks(b))[0, 1]
    assert spearman(torch.tensor(a), torch.tensor(b)) == pytest.approx(wanted, abs=1e-12)
    assert spearman(torch.arange(5.0), torch.arange(5.0) ** 3) == pytest.approx(1)
    assert spearman(torch.arange(5.0), -torch.arange(5.0)) == pytest.approx(-1)
    assert spearman(torch.ones(5), torch.arange(5.0)) == 0
    assert top_share(torch.tensor([1.0, 4, 3, 2]), 0.25) == pytest.approx(0.4)
    assert top_share(torch.tensor([1.0, 4, 3, 2]), 1.0) == pytest.approx(1)
    assert top_share(torch.zeros(4), 0.5) == 0


def test_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_deviation, "RATIOS", (0.0, 0.15, 1.0))
    one = case("llama")
    subject = subject_of(one)
    found = deviation_report(subject)
    layers = len(one.decoder.layers)
    assert [row["layer"] for row in found["layers"]] == list(range(layers))
    assert found["tokens"]["reused"] == sum(map(len, CHUNKS)) == len(found["token_deviation"])
    assert found["layers"][0]["spearman_next"] is None
    assert all(-1 <= row["spearman_next"] <= 1 for row in found["layers"][1:-1])
    for row in found["layers"][1:]:
        shares = list(row["top_share"].values())
        assert shares == sorted(shares)
        assert row["v_relative"] > 0
        assert list(row["quantiles"].values()) == sorted(row["quantiles"].values())
    by: dict[tuple[str, float], dict[str, Any]] = {(row["choice"], row["ratio"]): row for row in found["attention"]}
    assert by["hkvd", 0.0]["deviation"] == by["random", 0.0]["deviation"] > 1e-3
    for choice in CHOICES:
        assert by[choice, 1.0]["deviation"] < 1e-5
        assert by[choice, 0.15]["tokens_recomputed"] == math.ceil(0.15 * found["tokens"]["reused"])
        assert by[choice, 0.15]["by_layer"][0] <= by[choice, 0.0]["by_layer"][0] + 1e-6


def test_nothing_that_is_reused_from_elsewhere() -> None:
    one = case("llama")
    with pytest.raises(UsageError, match="reused"):
        subject_of(one, one.plan(CHUNKS[:1], lead_in=PREFIX))
