"""Attention of scattered rows against the formula, written out."""

from __future__ import annotations

import math

import pytest
import torch

from kvtool.core.common.switches import ATTENTION
from kvtool.core.errors import ModelError
from kvtool.core.kernels.attention import eager, sdpa
from kvtool.core.kernels.attention.params import AttentionParams, KeyRanges
from kvtool.core.model.attention import QueryRows
from kvtool.core.model.hf.attention import rows_attention
from tests.spying import calls_of

HEADS, KV_HEADS, DIM, KEYS = 4, 2, 8, 200
BLOCK = 64
MODULE = torch.nn.Identity()
MODULE.layer_idx = 0


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


KEY, VALUE = random(1, KV_HEADS, KEYS, DIM, seed=1), random(1, KV_HEADS, KEYS, DIM, seed=2)
PLAIN = AttentionParams(0.3)


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
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])  # our own: test_flash.py
@pytest.mark.parametrize("long_prefill", [20, sdpa.LONG_PREFILL])
def test_a_row_sees_the_keys_up_to_its_position(
    positions: list[int], long_prefill: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "BLOCK", BLOCK)
    monkeypatch.setattr(sdpa, "LONG_PREFILL", long_prefill)
    monkeypatch.setenv(ATTENTION, kernel)
    query = random(1, HEADS, len(positions), DIM)
    out, weights = rows_attention(MODULE, query, KEY, VALUE, None, scaling=0.3, rows=rows(*positions))
    assert weights is None
    assert out.shape == (1, len(positions), HEADS, DIM)
    torch.testing.assert_close(out, by_formula(query, positions))


def test_products_have_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other shape costs oneDNN new code: so many keys as the rows see are rounded up, and hidden."""
    seen = calls_of(monkeypatch, torch, "bmm", lambda one, other: max(other.shape[1:]))
    monkeypatch.setattr(eager, "_SCORE_BYTES", 1)  # blocks of 16 rows
    at = list(range(KEYS))
    query = random(1, HEADS, KEYS, DIM)
    out = eager.attend(query, KEY, VALUE, PLAIN, KeyRanges(at, torch.tensor(at)))
    torch.testing.assert_close(out.transpose(1, 2), by_formula(query, at))
    assert {*seen} - {DIM} == {64, 128, 192, 200}


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


SHAPED = {
    "window": AttentionParams(0.3, window=30),
    "window of one": AttentionParams(0.3, window=1),
    "cap": AttentionParams(0.3, softcap=1.5),
    "sinks": AttentionParams(0.3, sinks=torch.linspace(-1, 3, HEADS)),
    "all": AttentionParams(0.3, window=70, softcap=1.5, sinks=torch.linspace(-1, 3, HEADS)),
}


@pytest.mark.parametrize("scoring", SHAPED.values(), ids=SHAPED)
@pytest.mark.parametrize("positions", [[0], [199], [3, 7, 50, 51, 199], list(range(200))], ids=len)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])  # our own: test_flash.py
def test_windows_caps_and_sinks(
    kernel: str, positions: list[int], scoring: AttentionParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "BLOCK", BLOCK)
    monkeypatch.setenv(ATTENTION, kernel)
    query = random(1, HEADS, len(positions), DIM)
    more = {"sliding_window": scoring.window, "softcap": scoring.softcap, "s_aux": scoring.sinks}
    out, _ = rows_attention(MODULE, query, KEY, VALUE, None, scaling=0.3, rows=rows(*positions), **more)
    torch.testing.assert_close(out, by_formula(query, positions, scoring))


def test_a_row_does_not_depend_on_the_rows_behind_it() -> None:
    """Other rows in its block, or none; a single row takes a kernel of its own."""
    positions = [3, 7, 50, 120, 121, 199]
    query = random(1, HEADS, len(positions), DIM)
    whole, _ = rows_attention(MODULE, query, KEY, VALUE, None, scaling=0.3, rows=rows(*positions))
    for count in range(1, len(positions)):
        part, _ = rows_attention(
            MODULE, query[:, :, :count], KEY, VALUE, None, rows=rows(*positions[:count]), scaling=0.3
        )
        torch.testing.assert_close(part, whole[:, :count])


def test_rows_know_whether_they_are_dense() -> None:
    assert rows(0, 1, 2).dense
    assert not rows(1, 2, 3).dense
    assert not rows(0, 2).dense
    assert len(rows(4, 9)) == 2
    assert rows(4, 9).order == [4, 9]
