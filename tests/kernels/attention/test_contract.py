"""Every attention backend against the formula, for each kind of call that it does not decline on this CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvtool.core.kernels.attention.dispatch import BACKENDS, AttentionBackend
from kvtool.core.kernels.attention.params import AttentionCall, AttentionParams, KeyRanges
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
