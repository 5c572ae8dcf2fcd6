"""Attention modules of a model: those that call `transformers`' attention interface, whatever their names."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

from kvtool.core.errors import ModelError

# What models and layers call the cache that they are given: `transformers` up to 5.23, and since 5.24; BLOOM's layers.
CACHES = ("past_key_values", "cache", "layer_past")
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
HINT = "use a causal language model with ordinary rotary attention"


def base_of(model: Any) -> Any:
    """Return a causal language model without its LM head; some return themselves (Llama 4)."""
    base = model.get_decoder()
    return base.model if base is model and hasattr(model, "model") else base


def layers_of(base: Any) -> list[Any]:
    """Return the decoder layers of a model without its LM head.

    Raises
    ------
    ModelError : it has none under that name.
    """
    layers = getattr(base, "layers", None)
    if layers is None:
        raise ModelError(
            f"{type(base).__name__} has no stack of decoder layers; that would need another way to run them one by one",
            HINT,
        )
    return list(layers)


def attentions_of(layers: Sequence[Any], in_some: bool) -> dict[int, Any]:
    """Find the attention modules of layers, by layer: the part of each that lets others compute its attention.

    Parameters
    ----------
    in_some : there may be layers without any.

    Raises
    ------
    ModelError : a layer has several, or none: it attends by code of its own, which takes no rows of ours.
    """
    found = {number: [child for child in layer.children() if _asks(child)] for number, layer in enumerate(layers)}
    for number, those in found.items():
        if len(those) > 1 or not (those or in_some):
            several = "several attentions in a layer; that would need keys and values stored for each"
            own = "attention of its own, which takes no rows of others; that would need our rows and masks given to it"
            raise ModelError(f"{type(layers[number]).__name__} has {several if those else own}", HINT)
    return {number: those[0] for number, those in found.items() if those}


def still(attentions: Sequence[Any]) -> None:
    """Keep attention modules from scaling queries by what they take for a row's position (Llama 4).

    They count it from the cache's length, which rows of ours do not follow. In a prompt that is taken (`context_limit`)
    no scale is another than one.
    """
    for attention in attentions:
        if getattr(attention, "attn_temperature_tuning", False):
            attention.attn_temperature_tuning = False


def _asks(module: Any) -> bool:
    """Return True if a module's own forward goes through the attention interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and _INTERFACE in code.co_names


def cache_name(module: Any) -> str:
    """Return the name by which a module's forward takes the cache."""
    return _cache_name(type(module).forward)


@cache
def _cache_name(forward: Any) -> str:
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHES if name in parameters), CACHES[0])
