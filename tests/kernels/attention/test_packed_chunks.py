"""Attention of packed chunks against the formula, written out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kvtool.core.common.machine import ATTENTION
from kvtool.core.kernels.attention import dispatch, eager, sdpa
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.model.forward import PackedChunks
from kvtool.core.native.isa import isa_here
from tests.kernels.formulas import attention, random

HEADS, KV_HEADS, DIM, LEAD = 4, 2, 16, 11
LENGTHS = (5, 1, 23, 16)
BACKENDS = [backend.name for backend in dispatch.BACKENDS if backend.name != "triton"]


def take(backend: str, patch: pytest.MonkeyPatch) -> None:
    if backend == "flash" and isa_here() is None:
        pytest.skip("there is no machine code for this CPU")
    patch.setenv(ATTENTION, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lead", [0, LEAD])
@pytest.mark.parametrize("window", [None, 1, 4, 15])
def test_a_chunk_sees_the_lead_in_and_its_own_past(
    backend: str, lead: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(backend, monkeypatch)
    total = sum(LENGTHS)
    query, key, value = (random(1, n, total, DIM, seed=i) for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    own = [(random(1, KV_HEADS, lead, DIM, seed=7), random(1, KV_HEADS, lead, DIM, seed=8))] if lead else []
    out = PackedChunks.of(LENGTHS, own).attend(0, query, key, value, AttentionParams(0.3, window))
    start = 0
    for length in LENGTHS:
        span = slice(start, start + length)
        sides = [side[:, :, span] for side in (key, value)]
        if own:
            sides = [torch.cat([first, side], 2) for first, side in zip(own[0], sides, strict=True)]
        limits = torch.arange(lead, lead + length)
        expected = attention(query[:, :, span], *sides, AttentionParams(0.3, window), limits)
        torch.testing.assert_close(out[:, :, span], expected.float())
        start += length


@pytest.mark.parametrize("common", [0.0, 300.0])
def test_bfloat16_scores_keep_their_differences(common: float) -> None:
    """A large part that all scores of a row share (Qwen2's key biases) must not swallow their differences."""
    query, key, value = (random(1, 2, 64, 32, seed=i, dtype=torch.bfloat16) for i in range(3))
    query[..., 0], key[..., 0] = math.sqrt(common / 0.2), math.sqrt(common / 0.2)
    exact = attention(query, key, value, AttentionParams(0.2), torch.arange(64))
    rows = KeyRanges.run(range(64), None, "cpu")
    found = [one.attend(query, key, value, AttentionParams(0.2), rows).double() for one in (eager, sdpa)]
    errors = [(one - exact).norm() / exact.norm() for one in found]
    plain = (query[0] * 0.2) @ key[0].transpose(-1, -2)
    plain = plain.masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ value[0]
    flash = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.2)
    assert max(errors) < 1.5 * (flash.double() - exact).norm() / exact.norm() + 1e-3
    if common:
        assert errors[0] < 0.1 * (plain.double() - exact[0]).norm() / exact.norm()
