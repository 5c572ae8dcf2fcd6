"""What modes that rank rows have in common."""

from __future__ import annotations

import math

import torch

from kvtool.core.fusion.plan import Plan


def share_of(share: float, context: int) -> int:
    """⌈share · context⌉ of the decimal that was meant: 0.07 · 100 is 7, though the product is 7.000000000000001."""
    return math.ceil(round(share * context, 6))


def squared_error(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Squared distance by row, float32 `[rows]`, of keys or of values `[1, kv_heads, rows, head_dim]`."""
    return (new.float() - old.float()).square().sum((0, 1, 3))


def context_tokens(plan: Plan) -> int:
    """Cached tokens of chunks: what a ratio is a share of."""
    return sum(len(segment.ids) for segment in plan.cached_chunks)


def hit_rows(plan: Plan) -> torch.Tensor:
    """Bool `[plan.length]`: rows of chunks whose stored KV is not what full prefill gives."""
    rows = torch.zeros(plan.length, dtype=torch.bool)
    for segment in plan.chunks:
        rows[segment.start : segment.stop] = segment.status == "hit"
    return rows


def highest(worth: torch.Tensor, among: torch.Tensor, count: int) -> torch.Tensor:
    """Bool, as `among`: the `count` positions among these with the highest worth."""
    places = among.nonzero()[:, 0]
    chosen = torch.zeros_like(among)
    chosen[places[worth[places].topk(min(count, len(places))).indices]] = True
    return chosen
