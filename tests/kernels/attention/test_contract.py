"""Every attention backend against the formula, for each kind of call that it does not decline on this CPU.

And attention weights as numbers: block by block as all at once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvtool.core.kernels.attention import eager
from kvtool.core.kernels.attention.dispatch import BACKENDS, AttentionBackend
from kvtool.core.kernels.attention.eager import attention_weights, mean_weights
from kvtool.core.kernels.attention.params import AttentionCall, AttentionParams, KeyRanges
from kvtool.core.model.forward import QueryRows
from tests.kernels.formulas import attention, random

HEADS, KV_HEADS, DIM, KEYS = 4, 2, 32, 60
FIRST = 30  # position of the first row
PARAMS = {
    "plain": AttentionParams(0.2),
    "window": AttentionParams(0.2, 16),
    "softcap": AttentionParams(0.2, softcap=1.5),
    "sinks": AttentionParams(0.2, 16, sinks=torch.linspace(-1, 3, HEADS)),
}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("value_dim", [DIM, 16], ids=["same width", "narrow values"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host limits", "device limits"])
def test_backend_computes_the_formula_and_reads_no_undefined_key(
    backend: AttentionBackend, params: AttentionParams, batch: int, rows: int, value_dim: int, on_device: bool
) -> None:
    query, key, value = (
        random(batch, heads, count, width, seed=heads + width)
        for heads, count, width in ((HEADS, rows, DIM), (KV_HEADS, KEYS, DIM), (KV_HEADS, KEYS, value_dim))
    )
    ranges = KeyRanges.run(range(FIRST, FIRST + rows), params.window, "cpu")
    limits = ranges.limits
    if on_device:
        bounds = range(FIRST + 1, FIRST + rows + 1)
        ranges = replace(ranges, last=bounds, on_device=True)
    else:
        key[:, :, FIRST + rows :] = value[:, :, FIRST + rows :] = torch.nan
    call = AttentionCall.of(query, key, value, params, ranges)._replace(is_asked=True)
    if reason := backend.declines(call):
        pytest.skip(reason)
    attended = backend.attend(query, key, value, params, ranges)
    expected = attention(query, key.nan_to_num(), value.nan_to_num(), params, limits)
    torch.testing.assert_close(attended, expected.float())


SCORINGS = [
    AttentionParams(0.25),
    AttentionParams(0.7, window=7),
    AttentionParams(0.7, softcap=1.0),
    AttentionParams(0.7, sinks=torch.ones(6)),
]


@pytest.mark.parametrize("positions", [[0], [39], [5, 6, 30, 39], list(range(40))], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("scoring", SCORINGS, ids=["plain", "window", "cap", "sinks"])
def test_the_mean_over_heads(
    heads: tuple[int, int], positions: list[int], scoring: AttentionParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, at = torch.Generator().manual_seed(0), torch.tensor(positions)
    query, key = torch.randn(heads[0], len(at), 16, generator=draw), torch.randn(heads[1], 40, 16, generator=draw)
    sinks = None if scoring.sinks is None else scoring.sinks[: heads[0]]
    scoring, seen = replace(scoring, sinks=sinks), QueryRows.of(at, "cpu").seen(scoring.window)
    expected = attention_weights(query, key, seen, scoring).mean(0)
    torch.testing.assert_close(mean_weights(query, key, seen, scoring), expected)
    monkeypatch.setattr(eager, "_WEIGHT_BYTES", 4 * heads[0] * 40 * 3)  # a few rows at a time
    torch.testing.assert_close(mean_weights(query, key, seen, scoring), expected)
    places = torch.arange(40)
    assert torch.equal(expected.gt(0), (places <= at[:, None]) & (places > at[:, None] - (scoring.window or 40)))
    whole = torch.ones(len(at))  # a sink's share is no key's
    assert torch.allclose(expected.sum(1), whole) == (sinks is None)
