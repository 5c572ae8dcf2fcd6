"""Attention of scattered prompt rows over a whole prompt cache, without an N×N mask."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from kvtool.core.errors import ModelError
from kvtool.core.kernels.attention.cuda_rows import cuda_kernel
from kvtool.core.kernels.attention.dispatch import FUSED, attend_rows, kernel_here, own_kernel
from kvtool.core.kernels.attention.params import Scoring, Seen
from kvtool.core.model.latent import latents_of

IMPLEMENTATION = "kvtool_rows"
Watch = Callable[[int, torch.Tensor, torch.Tensor, Scoring], None]

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
    watch : is shown every layer's queries and keys: (layer, query, key, scoring), as `attend` has them.
    stored : what they give is kept: it is computed by the model's own forward, so that it stays the same to the bit.
    turned_to : the position of every place of the prompt, ascending, where some are not their place; None: all are.
    """

    positions: torch.Tensor
    order: list[int] = field(repr=False)
    dense: bool
    watch: Watch | None = None
    stored: bool = False
    turned_to: Sequence[int] | None = field(default=None, repr=False)
    _seen: dict[int | None, Seen] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, positions: torch.Tensor, device: torch.device | str, turned_to: Sequence[int] | None = None) -> Rows:
        """Rows at places `positions` (int64 `[rows]`, ascending)."""
        order: list[int] = positions.tolist()
        dense = order == list(range(len(order)))
        return cls(positions.to(device, non_blocking=True), order, dense, turned_to=turned_to)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def pairs(self) -> int:
        """How many keys the rows see without a window, added up."""
        return sum(self.order) + len(self.order)

    def last(self, count: int) -> Rows:
        """The last `count` rows."""
        return replace(self, positions=self.positions[-count:], order=self.order[-count:], dense=False, _seen={})

    def seen(self, window: int | None) -> Seen:
        """Which keys each row sees through a window; a pass asks for the same at every layer of a kind."""
        if window not in self._seen:
            self._seen[window] = self._through(window)
        return self._seen[window]

    def _through(self, window: int | None) -> Seen:
        if window is None:
            return Seen(self.order, self.positions)
        if self.turned_to is None:
            first = [max(0, place - window + 1) for place in self.order]
        else:
            first = [bisect_left(self.turned_to, self.turned_to[place] - window + 1) for place in self.order]
        return Seen(self.order, self.positions, first, torch.tensor(first).to(self.positions.device, non_blocking=True))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Attend: row i sees the keys at places ≤ `positions[i]`, or those of them that are within its window."""
        if self.watch is not None:
            self.watch(layer, query, key, scoring)
        alike = key.shape[3] == value.shape[3]  # torch's own keeps all scores of others
        whole = self.dense and key.shape[2] == len(self) > 1 and scoring.is_plain and alike
        if whole and self._causal_pays(query, key, value, scoring.scale):
            return _causal(query, key, value, scoring.scale)
        return attend_rows(query, key, value, scoring, self.seen(scoring.window))

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
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Attention of one layer: `[batch, heads, rows, head_dim]`, as `query` is."""


class Placing(Attends, Protocol):
    """Query rows that also know where they stand in the prompt: int64 `[rows]` on the model's device."""

    @property
    def positions(self) -> torch.Tensor: ...

    def last(self, count: int) -> Placing:
        """The last `count` of them."""
        ...


_passing: ContextVar[Callable[[], Attends | None]] = ContextVar("passing", default=lambda: None)


@contextmanager
def passing(rows: Callable[[], Attends | None]) -> Iterator[None]:
    """Say which rows a model computes inside: layers may hand on to their attention only what they know (StableLM)."""
    token = _passing.set(rows)
    try:
        yield
    finally:
        _passing.reset(token)


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
    key, value : `[batch, kv_heads, keys, head_dim]`; of a module that keeps latents the single head's (latent.py).
    rows : the query rows. None: those that are `passing`; without any, a plain causal prefill.
    kwargs : `sliding_window`, `softcap` and `s_aux` (sinks), where a layer has them.

    Returns
    -------
    `[batch, rows, heads, head_dim]`, and None for the weights, which are never materialised.
    """
    if kwargs.get("position_bias") is not None:
        needed = "that would need the bias made for chosen rows"
        raise ModelError(f"attention adds a position_bias; {needed}", "use a model with plain rotary attention")
    latents = latents_of(module)
    scoring = Scoring(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    rows = _passing.get()() if rows is None else rows
    if latents is not None and isinstance(rows, Rows) and latents.should_expand(len(rows), key.shape[2], rows.pairs):
        (key, value), latents = latents.heads_of(key), None
    if latents is not None:
        query = latents.absorbed(query)
    if rows is None:
        out = _alone(query, key, value, scoring)
    else:
        out = rows.attend(module.layer_idx, query, key, value, scoring)
    if latents is not None:
        out = latents.unfolded(out)
    return out.transpose(1, 2).contiguous(), None


def _alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Attention where no rows are named: of a whole prefill."""
    if key.shape[2] != query.shape[2]:
        raise ModelError("rows over a longer cache need their positions", "this is a bug in kvtool")
    if scoring.is_plain:
        return _causal(query, key, value, scoring.scale)
    return attend_rows(query, key, value, scoring, Seen.run(range(query.shape[2]), scoring.window, query.device))


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, scale=scale, is_causal=True, enable_gqa=groups > 1)


def plain_attention(model: Any) -> str:
    """The implementation of `transformers`' own that a model computes with where kvtool's is not wanted."""
    return "sdpa" if model._supports_sdpa else "eager"


def register() -> None:
    """Make the implementation known to `transformers` (idempotent)."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, rows_attention)
