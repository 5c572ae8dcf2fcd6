"""Attention mass by class and the keys that hold most of it, against eager attention by unmodified `transformers`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtool.core.fusion.plan import Plan
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.reports.attention_mass import (
    CLASSES,
    MASS,
    START_TOKENS,
    Classes,
    Tally,
    keys_needed,
    overlap,
    sparsity_report,
)
from kvtool.reports.reused_prompt import Chosen, ReusedPrompt
from tests.fusion.making import BOS, CHUNKS, NAMES, PREFIX, Case, case, tokens
from tests.reports.plain import attention_of, past_of


def subject_of(one: Case) -> ReusedPrompt:
    return ReusedPrompt.of(one.decoder, one.plan(lead_in=BOS), one.source)


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
    monkeypatch.setattr("kvtool.reports.attention_mass._BLOCK_BYTES", most)
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


def test_the_same_question_looks_at_the_same_positions() -> None:
    one = case("llama")
    subject = subject_of(one)
    same, other = subject.plan.segments[-1].ids, tokens(11, 60)
    found = sparsity_report(subject, [same])["stability"]
    assert found["by_layer"] == [1.0] * len(one.decoder.layers)
    assert found["questions"] == 2
    apart = sparsity_report(subject, [other, same])["stability"]
    assert apart["questions"] == 3
    assert apart["mean_share"] < 1
    assert 0 < apart["chance_share"] < 0.1
    assert overlap(torch.tensor([[True, True, False]]), torch.tensor([[True, False, True]])) == [0.5]


def test_shares_of_classes() -> None:
    subject = subject_of(case("llama"))
    found = sparsity_report(subject)
    share, length = found["class_share"], subject.plan.length
    assert share["sink"] == pytest.approx(1 / length)
    assert share["instruction"] == pytest.approx((len(PREFIX) - 1) / length)
    assert share["chunk starts"] == pytest.approx(sum(min(START_TOKENS, len(chunk)) for chunk in CHUNKS) / length)
    assert sum(share.values()) == pytest.approx(1)
    assert found["stability"] is None
