"""Sliding windows: what a layer asks for, held against its configuration, which `transformers` masks by."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from kvtool.core.errors import ModelError
from kvtool.core.model.modules import HINT
from kvtool.core.model.probe import ForwardEnded


def check_window(base: Any, config: Any, layer: int, window: int | None) -> None:
    """Refuse a layer whose window is none, or another one than its configuration says and its model masks by.

    Parameters
    ----------
    base : the decoder without its LM head.
    window : what the layer asks attention for; None: it sees all tokens before it.

    Raises
    ------
    ModelError
    """
    if window is not None and window < 1:
        nothing = "so that its rows see nothing; that would need a window of at least their own token"
        raise ModelError(f"layer {layer} has a window of {window} tokens, {nothing}", HINT)
    if _slides(config, layer) and not getattr(config, "sliding_window", None):
        unknown = "of which its configuration has no size; that would need a `sliding_window` in it"
        raise ModelError(f"layer {layer} attends through a window, {unknown}", HINT)
    stated = _stated_window(config, layer)
    if window != stated and (window is not None or _masks(base, config, layer)):
        raise ModelError(
            f"layer {layer} attends over {_told(window)}, its configuration says {_told(stated)}; "
            "that would need to be known which of them the model was trained with",
            "this family is not known to kvtool; use another model",
        )


def stated_windows(config: Any, layers: int) -> tuple[int | None, ...]:
    """The windows of the first layers of a model that is not built, by its configuration; None: a layer has none.

    One that its family does not know (Llama) is none. Whoever builds the model has the word of its layers
    (`model/kinds.py`), and of a family that knows the setting and does not heed it they say otherwise.
    """
    known = hasattr(type(config), "sliding_window")
    return tuple(_stated_window(config, layer) if known else None for layer in range(layers))


def _told(window: int | None) -> str:
    return "all tokens" if window is None else f"a window of {window}"


def _stated_window(config: Any, layer: int) -> int | None:
    """The sliding window of a layer by the configuration, or None."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if not window or (types and not _slides(config, layer)):
        return None
    return int(window) if types or getattr(config, "use_sliding_window", True) is not False else None


def _slides(config: Any, layer: int) -> bool:
    """Whether a configuration that tells layers by type says that this one has a window."""
    types = getattr(config, "layer_types", None) or ()
    return layer < len(types) and types[layer] == "sliding_attention"


def _masks(base: Any, config: Any, layer: int) -> bool:
    """Whether the model's own forward keeps a layer from what lies before the window that its configuration states.

    A configuration may state one that its family does not know (Llama). It is asked for the mask of four tokens, under
    a window of two.
    """

    masks: list[torch.Tensor | None] = []

    def stop(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        masks.append(kwargs.get("attention_mask"))
        raise ForwardEnded

    before, ways = config.sliding_window, base.config._attn_implementation
    hook = base.layers[layer].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        config.sliding_window = 2
        base.set_attn_implementation("eager")
        with suppress(ForwardEnded):
            base(input_ids=torch.zeros((1, 4), dtype=torch.int64, device=base.device), use_cache=False)
    finally:
        hook.remove()
        config.sliding_window = before
        base.set_attn_implementation(ways)
    return any(mask is None or bool(mask[0, 0, 3, 0] != mask[0, 0, 3, 3]) for mask in masks or [None])
