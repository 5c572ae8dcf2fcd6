"""Attention of scattered rows against the formula, written out."""

from __future__ import annotations

import math

import pytest
import torch

from kvtool.core.common.machine import ATTENTION
from kvtool.core.errors import ModelError
from kvtool.core.kernels.attention import sdpa
from kvtool.core.kernels.attention.params import AttentionParams
from kvtool.core.model.forward import QueryRows
from kvtool.core.model.hf.modules import rows_attention

HEADS, KV_HEADS, DIM, KEYS = 4, 2, 8, 200
BLOCK = 64
MODULE = torch.nn.Identity()
MODULE.layer_idx = 0


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


KEY, VALUE = random(1, KV_HEADS, KEYS, DIM, seed=1), random(1, KV_HEADS, KEYS, DIM, seed=2)
PLAIN = AttentionParams(0.3)
SCORINGS = {
    "plain": PLAIN,
    "window": AttentionParams(0.3, window=30),
    "window of one": AttentionParams(0.3, window=1),
    "cap": AttentionParams(0.3, softcap=1.5),
    "sinks": AttentionParams(0.3, sinks=torch.linspace(-1, 3, HEADS)),
    "all": AttentionParams(0.3, window=70, softcap=1.5, sinks=torch.linspace(-1, 3, HEADS)),
}


def by_formula(query: torch.Tensor, positions: list[int], params: AttentionParams = PLAIN) -> torch.Tensor:
    """softmax(QKᵀ · scale, capped, of the keys in a row's window, with sinks) V, `[batch, rows, heads, head_dim]`."""
    key, value = (side.repeat_interleave(HEADS // KV_HEADS, 1) for side in (KEY, VALUE))
    scores = query @ key.transpose(-1, -2) * params.scale
    if params.softcap is not None:
        scores = params.softcap * (scores / params.softcap).tanh()
    keys, places = torch.arange(KEYS), torch.tensor(positions)[:, None]
    hidden = (keys > places) | (keys <= places - (params.window or KEYS))
    powers = scores.masked_fill(hidden, -math.inf).exp()
    sinks = torch.zeros(HEADS) if params.sinks is None else params.sinks.exp()
    return (powers @ value / (powers.sum(-1, keepdim=True) + sinks[:, None, None])).transpose(1, 2)


def rows(*positions: int) -> QueryRows:
    return QueryRows.of(torch.tensor(positions), "cpu")


@pytest.mark.parametrize(
    "positions",
    [
        *([0], [199], [3, 7, 50, 51, 199]),
        *map(list, (range(20), range(0, 200, 2), range(200 - BLOCK, 200), range(199 - BLOCK, 200), range(200))),
    ],
    ids=lambda p: f"{len(p)} to {p[-1]}",
)
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])  # our own: test_flash.py
@pytest.mark.parametrize("long_prefill", [20, sdpa.LONG_PREFILL])
def test_a_row_sees_the_keys_of_its_window_up_to_its_position(
    positions: list[int], scoring: AttentionParams, long_prefill: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "BLOCK", BLOCK)
    monkeypatch.setattr(sdpa, "LONG_PREFILL", long_prefill)
    monkeypatch.setenv(ATTENTION, kernel)
    query = random(1, HEADS, len(positions), DIM)
    more = {"sliding_window": scoring.window, "softcap": scoring.softcap, "s_aux": scoring.sinks}
    out, weights = rows_attention(MODULE, query, KEY, VALUE, None, scaling=0.3, rows=rows(*positions), **more)
    assert weights is None
    assert out.shape == (1, len(positions), HEADS, DIM)
    torch.testing.assert_close(out, by_formula(query, positions, scoring))


def test_without_rows_a_prefill_is_causal() -> None:
    query = random(1, HEADS, 30, DIM)
    out, _ = rows_attention(MODULE, query, KEY[:, :, :30], VALUE[:, :, :30], None, scaling=0.3)
    torch.testing.assert_close(out, by_formula(query, list(range(30))))


@pytest.mark.parametrize("count", [1, 2])
def test_rows_over_a_longer_cache_need_positions(count: int) -> None:
    with pytest.raises(ModelError):
        rows_attention(MODULE, random(1, HEADS, count, DIM), KEY, VALUE, None)


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        rows_attention(MODULE, random(1, HEADS, 1, DIM), KEY, VALUE, None, position_bias=1.0)
    assert "position_bias; that would need" in caught.value.message
