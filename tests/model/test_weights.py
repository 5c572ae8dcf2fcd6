"""Attention weights as numbers: block by block as all at once."""

from __future__ import annotations

import pytest
import torch

from kvtool.core.model import weights
from kvtool.core.model.weights import attention_weights, mean_weights


@pytest.mark.parametrize("positions", [[0], [39], [5, 6, 30, 39], list(range(40))], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_the_mean_over_heads(
    heads: tuple[int, int], positions: list[int], scaling: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, at = torch.Generator().manual_seed(0), torch.tensor(positions)
    query, key = torch.randn(heads[0], len(at), 16, generator=draw), torch.randn(heads[1], 40, 16, generator=draw)
    expected = attention_weights(query, key, at, scaling).mean(0)
    torch.testing.assert_close(mean_weights(query, key, at, scaling), expected)
    monkeypatch.setattr(weights, "_SCORE_BYTES", 4 * heads[0] * 40 * 3)  # a few rows at a time
    torch.testing.assert_close(mean_weights(query, key, at, scaling), expected)
    assert torch.equal(expected.gt(0), torch.arange(40) <= at[:, None])
