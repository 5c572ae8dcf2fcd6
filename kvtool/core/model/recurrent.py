"""Whether a prompt cache, or a layer of one, keeps a state; asked without importing transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from kvtool.core.model.prompt_cache import PromptCache

if TYPE_CHECKING:
    from kvtool.core.model.hf.states import StateCache, StateLayer


# Asked without importing transformers.


def is_recurrent(cache: PromptCache | None) -> TypeGuard[StateCache]:
    return cache is not None and cache.is_recurrent


def has_state(layer: Any) -> TypeGuard[StateLayer]:
    return hasattr(layer, "states")
