"""Attention of scattered prompt rows over a whole prompt cache, without an N×N mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from kvtool.core.errors import ModelError
from kvtool.core.model.cuda_rows import cuda_kernel
from kvtool.core.model.kernels import FUSED, attend_rows, kernel_here, own_kernel

IMPLEMENTATION = "kvtool_rows"

# Where products pay, a prefill of so many rows is still left to torch's flash kernel: one block's scores then no longer
# fit the cache. Measured on 2 cores of an AMD EPYC, ms a layer, ours and torch's: 4,096 rows 184 and 237
# (Qwen2.5-0.5B's heads), 156 and 157 (SmolLM2-135M's); 7,800 rows 811 and 808, 685 and 556. Scattered rows are faster
# at any length.
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
    stored : what they give is kept: it is computed by the model's own forward, so that it stays the same to the bit.
    """

    positions: torch.Tensor
    order: list[int] = field(repr=False)
    dense: bool
    watch: Callable[[int, torch.Tensor, torch.Tensor, float | None], None] | None = None
    stored: bool = False

    @classmethod
    def of(cls, positions: torch.Tensor, device: torch.device | str) -> Rows:
        """Rows at `positions` (int64 `[rows]`, ascending)."""
        order: list[int] = positions.tolist()
        return cls(positions.to(device, non_blocking=True), order, order == list(range(len(order))))

    def __len__(self) -> int:
        return len(self.order)

    def last(self, count: int) -> Rows:
        """The last `count` rows."""
        return replace(self, positions=self.positions[-count:], order=self.order[-count:], dense=False)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attend: row i sees the keys at positions ≤ `positions[i]`; key j stands at prompt position j."""
        if self.watch is not None:
            self.watch(layer, query, key, scaling)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self.dense and key.shape[2] == len(self) > 1 and self._causal_pays(query, key, value, scale):
            return _causal(query, key, value, scale)
        return attend_rows(query, key, value, scale, self.order, self.positions)

    def _causal_pays(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> bool:
        """Whether torch's own causal attention is the fast one for a whole prefill.

        On a GPU it is not, where there is another kernel: cuDNN's, which torch takes on an H100, is .7 of Triton's time
        over 4,096 rows of Llama-3.1-8B's heads, but for every new length it makes a plan of 60 to 75 ms first.
        """
        if query.device.type == "cuda":
            return cuda_kernel() is None
        if query.device.type != "cpu" or kernel_here(query.dtype) == FUSED:
            return True
        return own_kernel(query, key, value, scale) is None and len(self) >= LONG_PREFILL


class Attends(Protocol):
    """Query rows that know which keys each of them sees."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        """Attention of one layer: `[batch, heads, rows, head_dim]`, as `query` is."""


class Placing(Attends, Protocol):
    """Query rows that also know where they stand in the prompt: int64 `[rows]` on the model's device."""

    @property
    def positions(self) -> torch.Tensor: ...

    def last(self, count: int) -> Placing:
        """The last `count` of them."""
        ...


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
    rows : the query rows. None: a plain causal prefill.

    Returns
    -------
    `[batch, rows, heads, head_dim]`, and None for the weights, which are never materialised.
    """
    for feature in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(feature) is not None:
            raise ModelError(f"attention with {feature} is not supported", "use a model with plain rotary attention")
    if rows is None:
        out = _alone(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling)
    else:
        out = rows.attend(module.layer_idx, query, key, value, scaling)
    return out.transpose(1, 2).contiguous(), None


def _alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention where no rows are named: of a whole prefill."""
    if key.shape[2] != query.shape[2]:
        raise ModelError("rows over a longer cache need their positions", "this is a bug in kvtool")
    return _causal(query, key, value, scale)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, scale=scale, is_causal=True, enable_gqa=groups > 1)


def register() -> None:
    """Make the implementation known to `transformers` (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, rows_attention)
