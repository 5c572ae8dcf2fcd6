"""Modules of a model of `transformers`: found by what their code calls, run only up to their attention, or, where they
expand latents, made to attend to these."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch

from kvtool.core.errors import ModelError
from kvtool.core.kernels.attention.params import KV, AttentionParams

# What models and layers call the cache that they are given: `transformers` up to 5.23, and since 5.24; BLOOM's layers.
CACHES = ("past_key_values", "cache", "layer_past")
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
HINT = "use a causal language model with ordinary rotary attention"


def base_of(model: Any) -> Any:
    base = model.get_decoder()
    return base.model if base is model and hasattr(model, "model") else base


def layers_of(base: Any) -> list[Any]:
    layers = getattr(base, "layers", None)
    if layers is None:
        raise ModelError(
            f"{type(base).__name__} has no stack of decoder layers; that would need another way to run them one by one",
            HINT,
        )
    return list(layers)


def attentions_of(layers: Sequence[Any], in_some: bool) -> dict[int, Any]:
    """Find the attention modules of layers, by layer; `in_some`: there may be layers without any."""
    attentions: dict[int, Any] = {}
    for number, layer in enumerate(layers):
        modules = [child for child in layer.children() if _is_attention(child)]
        if len(modules) > 1 or not (modules or in_some):
            several = "several attentions in a layer; that would need keys and values stored for each"
            odd = "attention of its own, which takes no rows of others; that would need our rows and masks given to it"
            raise ModelError(f"{type(layer).__name__} has {several if modules else odd}", HINT)
        if modules:
            attentions[number] = modules[0]
    return attentions


def disable_query_scaling(attentions: Sequence[Any]) -> None:
    """Keep attention modules from scaling queries by the cache's length (Llama 4), which rows of ours do not follow. In
    prompts up to `context_limit` every scale is one."""
    for attention in attentions:
        if getattr(attention, "attn_temperature_tuning", False):
            attention.attn_temperature_tuning = False


def _is_attention(module: Any) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and _INTERFACE in code.co_names


def cache_name(module: Any) -> str:
    return _cache_name(type(module).forward)


@functools.cache
def _cache_name(forward: Any) -> str:
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHES if name in parameters), CACHES[0])


class ForwardEnded(Exception):
    """Ends a forward before its end: what is left of it would be computed for nothing."""


class CacheProxy:
    """A cache without rows: `update` takes a layer's new keys and values, `[batch, kv_heads, rows, head_dim]`, and its
    number, and returns those to attend to.
    """

    def __init__(self, update: Callable[[torch.Tensor, torch.Tensor, int], KV]) -> None:
        self._update = update
        self.layers: list[Any] = []

    is_compileable = False

    @property
    def is_sliding(self) -> list[bool]:
        return []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KV:
        return self._update(key_states, value_states, layer_idx)


class LayerProbe:
    """A run of one layer up to its cache, or up to its attention, of which it takes the place as `AttentionRows`."""

    def __init__(self, until: Literal["cache", "attention"]) -> None:
        self._until = until
        self.cache = CacheProxy(self._written)  # to be given to the layer
        self.kv: KV | None = None  # what it writes to its cache
        self.attention: tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionParams] | None = None

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with suppress(ForwardEnded):
            forward(*args, **kwargs)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        self.attention = query, key, value, params
        raise ForwardEnded

    def _written(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> KV:
        self.kv = key, value
        if self._until == "cache":
            raise ForwardEnded
        return self.kv
