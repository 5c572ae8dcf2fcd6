"""Deviation and attention of reused KV, against full prefill and eager attention by unmodified `transformers`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kvtool.core.errors import UsageError
from kvtool.core.fusion.plan import Plan
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.reports import reused_prompt
from kvtool.reports.reused_prompt import (
    CLASSES,
    MASS,
    START_TOKENS,
    Chosen,
    Classes,
    ReusedPrompt,
    Tally,
    attention_deviation,
    deviation,
    deviation_report,
    keys_needed,
    most_deviating,
    sparsity_report,
    spearman,
    top_share,
)
from tests.fusion.making import BOS, CHUNKS, NAMES, PREFIX, Case, case, plain_rows
from tests.reports.plain import attention_of, past_of
from tests.wording import refused


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
        for own, wrong in ((found.keys[layer], k), (found.values[layer], v)):
            assert torch.allclose(own, (wrong**2).sum((0, 2)), atol=3e-5, rtol=1e-4)
    assert found.values[0].max() < 1e-8  # layer 0 depends only on the embedding
    assert found.values[1:].mean() > 1e-4


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


def test_the_most_deviating_rows() -> None:
    subject = subject_of(case("llama"))
    worth = torch.arange(len(subject.hits), 0.0, -1)
    for ratio in (0.0, 0.15, 1.0):
        chosen = most_deviating(subject, ratio, worth).nonzero()[:, 0].tolist()
        assert len(chosen) == math.ceil(round(ratio * len(subject.hits), 6))
        assert chosen == subject.hits[: len(chosen)].tolist()


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
    monkeypatch.setattr(reused_prompt, "RATIOS", (0.0, 0.15, 1.0))
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
    untouched, some, everything = found["attention"]
    assert untouched["deviation"] > 1e-3
    assert everything["deviation"] < 1e-5
    assert some["tokens_recomputed"] == math.ceil(0.15 * found["tokens"]["reused"])
    assert some["by_layer"][0] <= untouched["by_layer"][0] + 1e-6


def test_nothing_that_is_reused_from_elsewhere() -> None:
    one = case("llama")
    with refused(UsageError):
        subject_of(one, one.plan(CHUNKS[:1], lead_in=PREFIX))


# ---- attention by class ----


def class_of(plan: Plan, row: int, key: int) -> str:
    if key == 0:
        return "sink"
    if key < plan.segments[0].stop:
        return "instruction"
    for chunk in plan.chunks:
        if chunk.start <= key < chunk.stop:
            if key - chunk.start < START_TOKENS:
                return "chunk starts"
            return "own chunk" if chunk.start <= row < chunk.stop else "other chunks"
    return "question"


def by_hand(plan: Plan, weights: np.ndarray, rows: range) -> tuple[np.ndarray, np.ndarray]:
    """Mass `[heads, classes]` and share of keys `[heads]`, means over rows; `weights` are those of these rows."""
    mass, needed = np.zeros((len(weights), len(CLASSES))), np.zeros(len(weights))
    for number, row in enumerate(rows):
        for key in range(row + 1):
            mass[:, CLASSES.index(class_of(plan, row, key))] += weights[:, number, key]
        for head in range(len(weights)):
            taken = np.cumsum(np.sort(weights[head, number, : row + 1])[::-1])
            needed[head] += (np.searchsorted(taken, MASS * taken[-1] - 1e-6) + 1) / (row + 1)
    return mass / len(rows), needed / len(rows)


def told(report: dict[str, object], layer: int) -> tuple[np.ndarray, np.ndarray]:
    heads = report["layers"][layer]["heads"]  # type: ignore[index]
    return np.array([list(one["mass"].values()) for one in heads]), np.array([one["keys_for_mass"] for one in heads])


@pytest.mark.parametrize("name", NAMES)
def test_the_context_in_full(name: str) -> None:
    one = case(name)
    subject = subject_of(one)
    plan = subject.plan
    report = sparsity_report(subject)["chunk_attention"]["full"]
    rows = range(plan.chunks[0].start, plan.segments[-1].start)
    for layer, weights in enumerate(attention_of(one, plan.ids)):
        mass, needed = told(report, layer)
        right, keys = by_hand(plan, weights[:, rows.start : rows.stop].numpy(), rows)
        assert np.abs(mass - right).max() < 1e-5
        assert name == "gpt-oss" or mass.sum(1) == pytest.approx(1, abs=1e-5)  # a sink's share is no key's
        assert np.abs(needed - keys).max() < 1e-3  # rows with a weight at the very edge


@pytest.mark.parametrize("name", NAMES)
def test_the_question_over_full_and_reused_caches(name: str) -> None:
    one = case(name)
    subject = subject_of(one)
    plan = subject.plan
    start = plan.segments[-1].start
    reused = subject.fused(Chosen(torch.zeros(plan.length, dtype=torch.bool)))
    past = past_of(one, ((buffer.keys, buffer.values) for buffer in reused.cache.buffers), start)
    found = sparsity_report(subject)["question_attention"]
    rows = range(start, plan.length)
    full, reuse = attention_of(one, plan.ids), attention_of(one, plan.ids[start:], past)
    wanted = {"full": [weights[:, start:] for weights in full], "reuse": reuse}
    for mode, layers in wanted.items():
        for layer, weights in enumerate(layers):
            mass, needed = told(found[mode], layer)
            right, keys = by_hand(plan, weights.numpy(), rows)
            assert np.abs(mass - right).max() < 1e-5
            assert np.abs(needed - keys).max() < 1.01 / start  # a weight at the very edge
    assert set(found) == {"full", "reuse", "epic", "union"}


@pytest.mark.parametrize("most", [1, 60_000])
def test_rows_are_tallied_in_blocks_as_one(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.reports.reused_prompt._BLOCK_BYTES", most)
    one = case("llama")
    plan = one.plan(lead_in=BOS)
    count, heads = 150, 2
    dice = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, plan.length, 8, generator=dice) for _ in range(2))
    rows = torch.arange(plan.length - count, plan.length)
    tally = Tally(Classes.of(plan), rows)
    tally(0, query, key, AttentionParams(8**-0.5))
    scores = (query[0, :, -count:].double() @ key[0].double().transpose(1, 2)) * 8**-0.5
    scores.masked_fill_(torch.arange(plan.length) > rows[:, None], -torch.inf)
    weights = scores.softmax(-1).numpy()
    mass, _ = by_hand(plan, weights, range(int(rows[0]), plan.length))
    assert np.abs(tally.mass[0].numpy() - mass).max() < 1e-5
    needed = keys_needed(torch.from_numpy(weights), rows + 1)
    assert torch.allclose(tally.needed[0], needed.mean(1), atol=1e-3)


def test_keys_needed_by_hand() -> None:
    weights = torch.tensor([[[0.5, 0.3, 0.2, 0.0], [0.95, 0.05, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]])
    assert keys_needed(weights, torch.tensor([4, 2, 4])).tolist() == [[0.75, 0.5, 1.0]]


def test_shares_of_classes() -> None:
    subject = subject_of(case("llama"))
    found = sparsity_report(subject)
    share, length = found["class_share"], subject.plan.length
    assert share["sink"] == pytest.approx(1 / length)
    assert share["instruction"] == pytest.approx((len(PREFIX) - 1) / length)
    assert share["chunk starts"] == pytest.approx(sum(min(START_TOKENS, len(chunk)) for chunk in CHUNKS) / length)
    assert sum(share.values()) == pytest.approx(1)
