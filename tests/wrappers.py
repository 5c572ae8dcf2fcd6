"""Tiny multimodal models with random weights, of the real configuration classes; their text models are what is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers as t

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import Loaded, load_model
from tests.families import HYBRIDS, KINDS, SHAPE, save_tiny

_WINDOWED = {"sliding_window": 24, "head_dim": 16, "query_pre_attn_scalar": 16}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}}
_PARTS = {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
_PARTLY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0} | _PARTS}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_SEES = _TOWER | {"image_size": 28, "patch_size": 14}
_BLOCKS = {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 64}
_DEEP = _BLOCKS | {"patch_size": 14, "deepstack_visual_indexes": [0]}
_LLAMA4 = {"num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 16, "interleave_moe_layer_step": 2}
_WIDE = {"intermediate_size": 128, "projector_input_dim": 64, "projector_output_dim": 64}
_LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_GEMMA4 = {
    **{"layer_types": _LAYERS, "sliding_window": 30, "head_dim": 16, "global_head_dim": 32},
    **{"vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 32, "final_logit_softcapping": 30.0},
}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
WRAPPERS: dict[str, Callable[[], Any]] = {
    "gemma3-vision": lambda: t.Gemma3Config(
        text_config=t.Gemma3TextConfig(**SHAPE, **_WINDOWED), vision_config=_SEES, mm_tokens_per_image=4
    ),
    "gemma4-vision": lambda: t.Gemma4Config(
        text_config=t.Gemma4TextConfig(**SHAPE, **_GEMMA4),
        vision_config=t.Gemma4VisionConfig(**_TOWER, num_key_value_heads=2, head_dim=16, patch_size=14),
    ),
    "mistral3": lambda: t.Mistral3Config(
        text_config=t.MistralConfig(**SHAPE, head_dim=16, sliding_window=None), vision_config=_SEES
    ),
    "qwen2-vl": lambda: t.Qwen2VLConfig(
        text_config=t.Qwen2VLTextConfig(**SHAPE, **_SECTIONS).to_dict(),
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14},
    ),
    "qwen2.5-vl": lambda: t.Qwen2_5_VLConfig(
        text_config=t.Qwen2_5_VLTextConfig(**SHAPE, **_SECTIONS).to_dict(), vision_config=_BLOCKS | {"patch_size": 14}
    ),
    "qwen3-vl": lambda: t.Qwen3VLConfig(
        text_config=t.Qwen3VLTextConfig(**SHAPE, **_SECTIONS, head_dim=16).to_dict(), vision_config=_DEEP
    ),
    "qwen3-vl-moe": lambda: t.Qwen3VLMoeConfig(
        text_config=t.Qwen3VLMoeTextConfig(**SHAPE, **_SECTIONS, **_EXPERTS).to_dict(), vision_config=_DEEP
    ),
    "glm4v": lambda: t.Glm4vConfig(
        text_config=t.Glm4vTextConfig(**SHAPE, **_PARTLY).to_dict(),
        vision_config=_BLOCKS | {"patch_size": 14, "image_size": 28},
    ),
    "glm4v-moe": lambda: t.Glm4vMoeConfig(
        text_config=t.Glm4vMoeTextConfig(**SHAPE, **_PARTLY, **_ROUTED, n_group=1, topk_group=1).to_dict(),
        vision_config=_BLOCKS | {"patch_size": 14, "image_size": 28},
    ),
    "cohere2-vision": lambda: t.Cohere2VisionConfig(
        text_config=t.Cohere2Config(**SHAPE, layer_types=_LAYERS, sliding_window=24, logit_scale=1.0),
        vision_config=t.SiglipVisionConfig(**_SEES),
    ),
    "llama4": lambda: t.Llama4Config(  # its chunks and steps are longer than a prompt may be
        text_config=t.Llama4TextConfig(**SHAPE, **_LLAMA4),
        vision_config=t.Llama4VisionConfig(**_SEES | _WIDE, vision_output_dim=64),
    ),
    "llava": lambda: t.LlavaConfig(text_config=t.LlamaConfig(**SHAPE), vision_config=t.CLIPVisionConfig(**_SEES)),
    "internvl": lambda: t.InternVLConfig(
        text_config=t.Qwen2Config(**SHAPE), vision_config=_TOWER | {"image_size": [28, 28], "patch_size": [14, 14]}
    ),
    "idefics3": lambda: t.Idefics3Config(text_config=t.LlamaConfig(**SHAPE), vision_config=_SEES),
    "smolvlm": lambda: t.SmolVLMConfig(text_config=t.LlamaConfig(**SHAPE), vision_config=_SEES),
    "kimi-k2.5": lambda: t.Kimi_K25Config(
        text_config=KINDS["deepseek-v3"]().to_dict(),
        vision_config=_TOWER | {"patch_size": 14, "pos_emb_height": 2, "pos_emb_width": 2, "pos_emb_time": 1},
        projection_hidden_size=32,
        tie_word_embeddings=False,
    ),
}
# Those whose text model keeps states.
HYBRID_WRAPPERS: dict[str, Callable[[], Any]] = {
    "qwen3.5-vision": lambda: t.Qwen3_5Config(text_config=HYBRIDS["qwen3.5"]().to_dict(), vision_config=_DEEP),
    "lfm2-vl": lambda: t.Lfm2VlConfig(text_config=HYBRIDS["lfm2"](), vision_config=_SEES | {"num_patches": 4}),
}


def loaded_text(name: str, dtype: str = "float32", device: str = "cpu") -> Loaded:
    """The text model of a wrapper, saved as a whole and loaded from disk."""
    with TemporaryDirectory() as folder:
        files = resolve(str(save_tiny(name, Path(folder) / "model", dtype=dtype)))
        return load_model(files, device=device, dtype=dtype)


def text_model(name: str) -> Any:
    return loaded_text(name).model
