"""Attention of scattered prompt rows over a whole prompt cache, without an N×N mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from kvtool.core.errors import ModelError
from kvtool.core.model.products import attend_by_products

IMPLEMENTATION = "kvtool_rows"

# On a GPU rows are attended in blocks: one needs a mask of [BLOCK * groups, keys up to its last row] only, and skips
# every later key.
BLOCK = 256


# On the CPU a prefill of so many rows is left to torch's flash kernel: one block's scores then no longer fit the cache.
# Measured on 2 cores, ms a layer, ours and torch's: 4,096 rows 184 and 237 (Qwen2.5-0.5B's heads), 156 and 157
# (SmolLM2-135M's); 7,800 rows 811 and 808, 685 and 556. Scattered rows are faster by products at any length.
LONG_PREFILL = 6144


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The prompt positions a pass computes, in ascending order.

    Attributes
    ----------
    positions : int64 tensor `[rows]` on the model's device.
    order : the same positions as Python ints, so that key limits need no device synchronisation.
    dense : the rows are exactly 0 … n-1, so plain causal attention serves.
    watch : is shown every layer's queries and keys: (layer, query, key, scaling), as `attend` has them.
    """

    positions: torch.Tensor
    order: list[int] = field(repr=False)
    dense: bool
    watch: Callable[[int, torch.Tensor, torch.Tensor, float | None], None] | None = None

    @classmethod
    def of(cls, positions: torch.Tensor, device: torch.device | str) -> Rows:
        """Rows at `positions` (int64 `[rows]`, ascending)."""
        order: list[int] = positions.tolist()
        return cls(positions.to(device), order, order == list(range(len(order))))

    def __len__(self) -> int:
        return len(self.order)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Row i sees the keys at positions ≤ `positions[i]`; key j stands at prompt position j."""
        if self.watch is not None:
            self.watch(layer, query, key, scaling)
        if query.device.type == "cpu" and not (self.dense and len(self) >= LONG_PREFILL):
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return attend_by_products(query, key, value, scale, self.order, self.positions)
        return self.fused(query, key, value, scaling)

    def fused(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """The same in the device's own fused kernel."""
        if self.dense and key.shape[2] == len(self):
            return _dense(query, key, value, scaling)
        blocks = [self._block(query, key, value, scaling, at) for at in range(0, len(self), BLOCK)]
        return torch.cat(blocks, dim=2)

    def _block(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, at: int
    ) -> torch.Tensor:
        stop = min(at + BLOCK, len(self))
        keys = min(self.order[stop - 1] + 1, key.shape[2])
        visible = torch.arange(keys, device=query.device) <= self.positions[at:stop, None]
        # Query heads that share a key stand below each other as rows: with a mask CUDA's fused kernels take no grouped
        # heads, and keys repeated for every head would be copied for every block.
        kv_heads, groups = key.shape[1], query.shape[1] // key.shape[1]
        part = query[:, :, at:stop].reshape(1, kv_heads, groups * (stop - at), query.shape[3])
        mask = visible.repeat(groups, 1)
        out = _sdpa(part, key[:, :, :keys], value[:, :, :keys], mask, scaling, causal=False)
        return out.view(1, query.shape[1], stop - at, value.shape[3])


class Attends(Protocol):
    """Rows that know which keys they see."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attention of one layer: `[batch, heads, rows, head_dim]`, as `query` is."""


def rows_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    rows: Attends | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for `transformers`' attention interface: `rows` decide what is seen.

    Parameters
    ----------
    query : `[batch, heads, rows, head_dim]`.
    key, value : `[batch, kv_heads, keys, head_dim]`.
    rows : the query rows. None: one decoding row that sees everything, or a plain causal prefill.

    Returns
    -------
    `[batch, rows, heads, head_dim]`, and None for the weights, which are never materialised.
    """
    for feature in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(feature) is not None:
            raise ModelError(f"attention with {feature} is not supported", "use a model with plain rotary attention")
    if rows is None:
        out = _dense(query, key, value, scaling)
    else:
        out = rows.attend(module.layer_idx, query, key, value, scaling)
    return out.transpose(1, 2).contiguous(), None


def _dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    count = query.shape[2]
    if count > 1 and key.shape[2] != count:
        raise ModelError("several rows over a longer cache need their positions", "this is a bug in kvtool")
    if query.device.type == "cpu" and query.shape[0] == 1 and count == 1:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        last = key.shape[2] - 1
        return attend_by_products(query, key, value, scale, [last], torch.tensor([last]))
    return _sdpa(query, key, value, None, scaling, causal=count > 1)


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    causal: bool,
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, is_causal=causal, enable_gqa=groups > 1
    )


def register() -> None:
    """Make the implementation known to `transformers` (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, rows_attention)
