"""Tiny models of families that differ from one of `KINDS` (tests/families.py) in no kind of layer.

Their norms, MLPs, experts and sums are the model's own modules, which kvtool calls and does not know. So they are
tested with fewer modes (`tests/laws/test_more_families.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers

# Routers and experts by the names that configurations have for them.
_EXPERTS: dict[str, int] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 64),
}
_WINDOWED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
}
_LATENTS: dict[str, Any] = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 40, "q_lora_rank": 48},
    **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20},
}
_GRANITE: dict[str, Any] = {"attention_multiplier": 0.2, "residual_multiplier": 0.8, "logits_scaling": 2.0}
_TEMPERED = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 2048}

# The class of its configuration, and its settings in addition to the shape that all have.
MORE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("AfmoeConfig", _WINDOWED),
    "apertus": ("ApertusConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
    "arcee": ("ArceeConfig", {}),
    "aria": ("AriaTextConfig", {}),
    "axk1": ("AXK1Config", _LATENTS | {"first_k_dense_replace": 1}),
    "bitnet": ("BitNetConfig", {}),
    "cohere": ("CohereConfig", {"logit_scale": 1.0, "use_qk_norm": True}),
    "cohere2-moe": ("Cohere2MoeConfig", {"logit_scale": 1.0} | _WINDOWED),
    "cwm": ("CwmConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}} | _WINDOWED),
    "dots1": ("Dots1Config", {"sliding_window": None}),
    "ernie4.5": ("Ernie4_5Config", {}),
    "ernie4.5-moe": ("Ernie4_5_MoeConfig", {}),
    "exaone-moe": ("ExaoneMoeConfig", _WINDOWED),
    "flex-olmo": ("FlexOlmoConfig", {}),
    "flint": ("FlintConfig", _WINDOWED),
    "glm4": ("Glm4Config", {}),
    "glm4-moe": ("Glm4MoeConfig", {"use_qk_norm": True}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "granite-moe": ("GraniteMoeConfig", _GRANITE),
    "granite-moe-shared": ("GraniteMoeSharedConfig", _GRANITE),
    "granite-moe-swa": ("GraniteMoeSWAConfig", _GRANITE | _WINDOWED),
    "granite-swa": ("GraniteSWAConfig", _GRANITE | _WINDOWED),
    "helium": ("HeliumConfig", {}),
    "hy3": ("HYV3Config", {}),
    "hyperclovax": ("HyperCLOVAXConfig", {}),
    "jais2": ("Jais2Config", {}),
    "kolibri1": ("Kolibri1Config", _WINDOWED),
    "laguna": ("LagunaConfig", _WINDOWED),
    "mellum": ("MellumConfig", _WINDOWED),
    "minimax-m2": ("MiniMaxM2Config", {}),
    "ministral3": ("Ministral3Config", {"rope_parameters": _TEMPERED | {"llama_4_scaling_beta": 0.1}}),
    "nanochat": ("NanoChatConfig", {}),
    "nemotron": ("NemotronConfig", {}),
    "olmo": ("OlmoConfig", {"clip_qkv": 2.0}),
    "olmoe": ("OlmoeConfig", {}),
    "persimmon": ("PersimmonConfig", {"num_key_value_heads": None}),
    "phi": ("PhiConfig", {"qk_layernorm": True}),
    "phimoe": ("PhimoeConfig", {}),
    "qwen2-moe": ("Qwen2MoeConfig", {}),
    "seed-oss": ("SeedOssConfig", {}),
    "solar-open": ("SolarOpenConfig", {}),
    "starcoder2": ("Starcoder2Config", {}),
    "vaultgemma": ("VaultGemmaConfig", {"query_pre_attn_scalar": 16} | _WINDOWED),
}

# Which of them have experts.
ROUTED = (
    "afmoe aria axk1 cohere2-moe dots1 ernie4.5-moe exaone-moe flex-olmo flint glm4-moe granite-moe "
    "granite-moe-shared granite-moe-swa hy3 kolibri1 laguna mellum minimax-m2 olmoe phimoe qwen2-moe solar-open"
).split()


def made(name: str, shape: Mapping[str, Any]) -> Callable[[], Any]:
    kind, more = MORE[name]

    def make() -> Any:
        config = getattr(transformers, kind)
        known = config.__dataclass_fields__
        sizes = {"head_dim": 16} | _EXPERTS
        return config(**(dict(shape) | {key: size for key, size in sizes.items() if key in known} | more))

    return make
