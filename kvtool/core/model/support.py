"""Which models can have their KV cut, moved and fused: decided from the configuration, with the reason for a no."""

from __future__ import annotations

from typing import Any

from kvtool.core.errors import ModelError

SUPPORTED = (
    "decoder-only models with full attention (or one sliding window for all layers) and RoPE "
    "(plain, linear, llama3, yarn; longrope and dynamic up to the length before they change), such as Llama, Mistral, "
    "Mixtral, Qwen2/2.5/3, Phi-3 and 4, OLMo 2, Granite, SmolLM"
)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
_WINDOWED = ("sliding_attention",)
_FULL = ("full_attention",)
_RECURRENT = (
    "mamba_d_state",
    "mamba_d_ssm",
    "state_size",
    "ssm_state_size",
    "conv_L_cache",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "lru_width",
    "time_mix_extra_dim",
    "attn_layer_period",
)


def check_supported(config: Any) -> None:
    """Refuse a model whose chunks could not be moved, naming the reason.

    Parameters
    ----------
    config : a `transformers` configuration.

    Raises
    ------
    ModelError
    """
    for reason in _REASONS:
        if what := reason(config):
            name = getattr(config, "model_type", "") or type(config).__name__
            raise ModelError(f"the model ({name}) {what}", f"supported: {SUPPORTED}")


def check_model(model: Any) -> None:
    """Refuse what only the built model shows: attention sinks among its weights.

    Raises
    ------
    ModelError
    """
    sinks = [name for name, _ in model.named_parameters() if "sink" in name.rsplit(".", 1)[-1]]
    if sinks:
        raise ModelError(f"the model has learned attention sinks ({sinks[0]})", f"supported: {SUPPORTED}")


def context_limit(config: Any) -> int:
    """How many tokens prompt and answer may have: attention is full and positions are trained up to there.

    `longrope` rotates a longer prompt by other factors, from its first token on, and so does `dynamic` beyond
    `max_position_embeddings`: what is stored would no longer fit, and a longer prompt is refused.
    """
    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
    if rope.get("rope_type") in ("yarn", "linear") and rope.get("original_max_position_embeddings"):
        limit = max(limit, int(rope["original_max_position_embeddings"] * float(rope.get("factor") or 1.0)))
    window = _window(config)
    return min(limit, window) if window else limit


def _window(config: Any) -> int | None:
    """The sliding window that is in force, or None."""
    window = getattr(config, "sliding_window", None)
    layers = _layer_types(config)
    if not window or (layers and not set(layers) & set(_WINDOWED)):
        return None
    if not layers and getattr(config, "use_sliding_window", True) is False:
        return None
    return int(window)


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [])


def _rope(config: Any) -> dict[str, Any]:
    """RoPE settings with `rope_type` filled in; empty when there are none."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))} if rope else {}


def _multimodal(config: Any) -> str:
    parts = [
        name for name in ("vision_config", "audio_config", "text_config") if getattr(config, name, None) is not None
    ]
    return f"is a multimodal wrapper ({', '.join(parts)})" if parts else ""


def _encoder_decoder(config: Any) -> str:
    return "is an encoder-decoder" if getattr(config, "is_encoder_decoder", False) else ""


def _latent(config: Any) -> str:
    latent = getattr(config, "kv_lora_rank", None) is not None
    return "compresses its KV into a latent (MLA), which cannot be rotated to another position" if latent else ""


def _recurrent(config: Any) -> str:
    layers = _layer_types(config)
    if layers:
        other = {kind for kind in layers if "attention" not in kind or "linear" in kind} - {"attention"}
        return f"keeps a recurrent state in some layers ({', '.join(sorted(other))})" if other else ""
    names = [name for name in _RECURRENT if getattr(config, name, None) is not None]
    return f"keeps a recurrent state ({names[0]})" if names else ""


def _mixed_windows(config: Any) -> str:
    kinds = set(_layer_types(config)) - {"attention"}
    if kinds <= set(_FULL) or kinds == set(_WINDOWED):
        return ""
    return f"mixes kinds of attention ({', '.join(sorted(kinds))})" if len(kinds) > 1 else f"uses {kinds.pop()}"


def _masked(config: Any) -> str:
    """The reason against masks other than causal ones, and against sparse or shared attention."""
    if getattr(config, "attention_chunk_size", None) and "chunked_attention" in _layer_types(config):
        return "uses chunked attention"
    if getattr(config, "use_bidirectional_attention", None):
        return "uses bidirectional attention"
    if getattr(config, "num_kv_shared_layers", 0):
        return "shares KV between layers"
    sparse = [name for name in ("index_topk", "keep_window_size") if getattr(config, name, None)]
    return f"chooses keys by their content ({sparse[0]})" if sparse else ""


def _softcapping(config: Any) -> str:
    return "caps its attention scores (softcapping)" if getattr(config, "attn_logit_softcapping", None) else ""


def _positions(config: Any) -> str:
    """The reason against positions that do not give a key the same rotation in every prompt."""
    if getattr(config, "alibi", False) or getattr(config, "use_alibi", False):
        return "marks positions by ALiBi, not RoPE"
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return "has no rotary positions (RoPE), so a key cannot be moved"
    if any(isinstance(value, dict) for value in rope.values()):
        return "has a different RoPE for different layers"
    kind = _rope(config)["rope_type"]
    if rope.get("mrope_section") or kind == "mrope":
        return "has positions in several dimensions (M-RoPE)"
    return "" if kind in _ROPE_TYPES else f"scales its RoPE in an unknown way ({kind})"


def _switched_off_rope(config: Any) -> str:
    """The reason against hybrids that were built without recurrent layers and without positions."""
    kind = getattr(config, "position_embedding_type", "rope")
    hybrid = getattr(config, "mamba_d_state", None) is not None
    return "has no rotary positions (RoPE) in use" if hybrid and kind != "rope" else ""


def _sinks(config: Any) -> str:
    """The reason against the one family that is known to learn sinks; `check_model` finds others by their weights."""
    return "has learned attention sinks" if getattr(config, "model_type", "") == "gpt_oss" else ""


_REASONS = (
    _encoder_decoder,
    _multimodal,
    _latent,
    _recurrent,
    _softcapping,
    _sinks,
    _mixed_windows,
    _masked,
    _positions,
    _switched_off_rope,
)
