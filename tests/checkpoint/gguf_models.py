"""Tiny models of many architectures as GGUF files: real metadata, packed weights, as llama.cpp's converter has them.

`gguf_files.py` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import transformers

from tests.families import SHAPE

_SHAPE: dict[str, Any] = SHAPE | {"hidden_size": 256, "intermediate_size": 256}  # k-quants have blocks of 256
_TIED = _SHAPE | {"tie_word_embeddings": True}
_ROPE = {"rope_type": "default", "rope_theta": 25_000.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_SHARED = {"shared_expert_intermediate_size": 64}
_LONGROPE: dict[str, Any] = {
    **{"rope_type": "longrope", "rope_theta": 25_000.0, "partial_rotary_factor": 0.75},
    **{"original_max_position_embeddings": 1024, "factor": 2.0},
    "short_factor": [1.0 + i / 8 for i in range(24)],
    "long_factor": [2.0 + i for i in range(24)],
}
_GEMMA3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
_GEMMA4: dict[str, Any] = {
    **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 30},
    **{"head_dim": 32, "global_head_dim": 64, "final_logit_softcapping": 30.0},
    **{"vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 32},
}
_IN_GEMMA4: dict[str, Any] = {
    **{"attention.sliding_window": 30, "attention.sliding_window_pattern": [True, False, True, False]},
    **{"attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64},
    **{"attention.key_length_swa": 32, "attention.value_length_swa": 32, "rope.dimension_count_swa": 32},
    **{"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "final_logit_softcapping": 30.0},
    **{"embedding_length_per_layer_input": 32, "attention.shared_kv_layers": 0},
}
_DELTA: dict[str, Any] = {
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"head_dim": 32, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}
_IN_QWEN35: dict[str, Any] = {
    **{"rope.dimension_count": 16, "rope.dimension_sections": [4, 2, 2, 0], "full_attention_interval": 4},
    **{"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2},
    **{"ssm.time_step_rank": 4, "ssm.inner_size": 64},
}
_IN_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 128}
_IN_SHARED = {"expert_shared_feed_forward_length": 64}
_YARN = {"rope_type": "yarn", "rope_theta": 25_000.0, "factor": 4.0, "original_max_position_embeddings": 512}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 25_000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
_IN_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}


@dataclass(frozen=True)
class InGguf:
    """A family in GGUF: the architecture's name there, its configuration, and metadata in addition to what all have.
    `packed_as` names the format of tensors that the quantiser would pack otherwise."""

    architecture: str
    kind: str
    settings: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    packed_as: Mapping[str, str] = field(default_factory=dict)

    def config(self) -> Any:
        shape = _TIED if self.tied else _SHAPE
        return getattr(transformers, self.kind)(**shape | {"rope_parameters": dict(_ROPE)} | dict(self.settings))


IN_GGUF: dict[str, InGguf] = {
    "llama": InGguf("llama", "LlamaConfig", {}, {"rope.dimension_count": 64}),
    "llama-yarn": InGguf("llama", "LlamaConfig", {"rope_parameters": _YARN}, {"rope.dimension_count": 64} | _IN_YARN),
    "llama-linear": InGguf(
        "llama",
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 25_000.0, "factor": 4.0}},
        {"rope.dimension_count": 64, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama-llama3": InGguf("llama", "LlamaConfig", {"rope_parameters": _LLAMA3}, {"rope.dimension_count": 64}),
    "mistral": InGguf("llama", "MistralConfig", {"sliding_window": None}, {"rope.dimension_count": 64}),
    "qwen2": InGguf("qwen2", "Qwen2Config", {}),
    "qwen3": InGguf("qwen3", "Qwen3Config", {"head_dim": 32}),
    "qwen3-moe": InGguf("qwen3moe", "Qwen3MoeConfig", _EXPERTS | {"norm_topk_prob": True, "head_dim": 32}, _IN_EXPERTS),
    "qwen2-moe": InGguf("qwen2moe", "Qwen2MoeConfig", _EXPERTS | _SHARED, _IN_EXPERTS | _IN_SHARED),
    "phi3": InGguf(
        "phi3",
        "Phi3Config",
        {"sliding_window": 48},
        {"rope.dimension_count": 64, "attention.sliding_window": 48, "rope.scaling.original_context_length": 2048},
    ),
    "phi3-longrope": InGguf(
        "phi3",
        "Phi3Config",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 1024},
        {"rope.dimension_count": 48, "attention.sliding_window": 0, "rope.scaling.original_context_length": 1024}
        | {"rope.scaling.attn_factor": (1 + np.log(2) / np.log(1024)) ** 0.5},
    ),
    "gemma2": InGguf(
        "gemma2",
        "Gemma2Config",
        {"head_dim": 32, "sliding_window": 32, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0}
        | {"rope_parameters": None},
        {"attention.sliding_window": 32, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0},
        tied=True,
    ),
    "gemma3": InGguf(
        "gemma3",
        "Gemma3TextConfig",
        {"num_hidden_layers": 6, "head_dim": 32, "sliding_window": 32, "rope_parameters": _GEMMA3},
        {"attention.sliding_window": 32, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        tied=True,
    ),
    "gemma4": InGguf(
        "gemma4",
        "Gemma4TextConfig",
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "rope_parameters": None},
        _IN_GEMMA4 | {"attention.head_count_kv": [2, 1, 2, 1]},
        tied=True,
    ),
    "gemma4-shared": InGguf(
        "gemma4",
        "Gemma4TextConfig",
        _GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "rope_parameters": None},
        _IN_GEMMA4 | {"attention.shared_kv_layers": 2, "feed_forward_length": [256, 256, 512, 512]},
        tied=True,
    ),
    "gemma4-moe": InGguf(
        "gemma4",
        "Gemma4TextConfig",
        _GEMMA4
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 128}
        | {"rope_parameters": None, "hidden_size_per_layer_input": 0},
        _IN_GEMMA4 | _IN_EXPERTS | {"embedding_length_per_layer_input": 0},
        tied=True,
    ),
    "gpt-oss": InGguf(
        "gpt-oss",
        "GptOssConfig",
        {"head_dim": 64, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": _YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
        _IN_YARN | _IN_EXPERTS | {"attention.sliding_window": 16, "expert_feed_forward_length": 256},
    ),
    "stablelm": InGguf(
        "stablelm",
        "StableLmConfig",
        {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 32},
    ),
    "starcoder2": InGguf("starcoder2", "Starcoder2Config", {}, tied=True),
    "nemotron": InGguf(
        "nemotron",
        "NemotronConfig",
        {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.25}},
        {"rope.dimension_count": 16},
    ),
    "minimax-m2": InGguf(
        "minimax-m2",
        "MiniMaxM2Config",
        {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}},
        _IN_EXPERTS | {"expert_feed_forward_length": 256, "rope.dimension_count": 32, "expert_gating_func": 2},
    ),
    "lfm2": InGguf(
        "lfm2",
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
        {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3},
        tied=True,
    ),
    "qwen3.5": InGguf("qwen35", "Qwen3_5TextConfig", _DELTA, _IN_QWEN35),
    "qwen3.5-moe": InGguf(
        "qwen35moe", "Qwen3_5MoeTextConfig", _DELTA | _EXPERTS | _SHARED, _IN_QWEN35 | _IN_EXPERTS | _IN_SHARED
    ),
}
