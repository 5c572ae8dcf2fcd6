"""Layer probe: run a forward as far as it matters, and record what a layer writes to its cache and attends with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import torch
from transformers.cache_utils import Cache

from kvtool.core.kernels.attention.params import AttentionParams

KV = tuple[torch.Tensor, torch.Tensor]


class ForwardEnded(Exception):
    """Ends a forward before its end: what is left of it would be computed for nothing."""


class CacheProxy(Cache):
    """A cache without rows: a function takes a layer's new keys and values, and returns those to attend to.

    Parameters
    ----------
    update : called with keys and values, `[batch, kv_heads, rows, head_dim]`, and the layer's number.
    """

    def __init__(self, update: Callable[[torch.Tensor, torch.Tensor, int], KV]) -> None:
        super().__init__(layers=[])
        self._update = update

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KV:
        return self._update(key_states, value_states, layer_idx)


class LayerProbe:
    """Rows of one layer that go as far as its cache, or as far as its attention.

    Attributes
    ----------
    cache : to be given to the layer.
    kv : the keys and values that it writes to its cache; None: it writes none.
    attention : query, key, value and scoring as its attention takes them; None: it did not come to it.
    """

    def __init__(self, until: Literal["cache", "attention"]) -> None:
        self._until = until
        self.cache = CacheProxy(self._written)
        self.kv: KV | None = None
        self.attention: tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionParams] | None = None

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a layer, or its attention, until it is there."""
        with suppress(ForwardEnded):
            forward(*args, **kwargs)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: AttentionParams
    ) -> torch.Tensor:
        """Stand in for the rows of a pass (`Attends`)."""
        self.attention = query, key, value, scoring
        raise ForwardEnded

    def _written(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> KV:
        self.kv = key, value
        if self._until == "cache":
            raise ForwardEnded
        return self.kv
