"""Tiny random models of every supported family, for tests: seconds to build, and different enough to distinguish."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as t
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.more_families import MORE, made

VOCAB = 512
MAX_POSITIONS = 2048
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SHAPE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MAX_POSITIONS},
    **{"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 256},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 512}
# A prompt of more than 1,024 tokens would take the other factors, which no test may come to.
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 5.0, 9.0, 17.0, 30.0],
    "original_max_position_embeddings": 1024,
    "partial_rotary_factor": 0.75,
}
_CAPS = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_LAYERS = [_SLIDING, _SLIDING, _FULL, _SLIDING]
_WINDOWED: dict[str, Any] = {"layer_types": _LAYERS, "head_dim": 16}
_TWO_ROPES = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
}
_GEMMA4: dict[str, Any] = {
    **{"layer_types": [_SLIDING, _FULL, _SLIDING, _FULL], "sliding_window": 30},
    **{"head_dim": 16, "global_head_dim": 32, "final_logit_softcapping": 30.0},
    **{"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 32},
}
# Latents: ranks and parts of heads that are no multiples of each other, as many rotary numbers as machine code takes.
_LATENT: dict[str, Any] = SHAPE | {
    **{"num_key_value_heads": 4, "kv_lora_rank": 40, "q_lora_rank": 48},
    **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20},
}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1}

# Those that differ in a kind: of rotation, of norm of the keys, of window, of score. Every law runs over them in full.
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: t.LlamaConfig(**SHAPE),
    "llama-yarn": lambda: t.LlamaConfig(**SHAPE, rope_parameters=dict(_YARN)),
    "llama-dynamic": lambda: t.LlamaConfig(**SHAPE, rope_parameters=dict(_DYNAMIC)),
    "qwen2": lambda: t.Qwen2Config(**SHAPE),
    "qwen3": lambda: t.Qwen3Config(**SHAPE, head_dim=32),  # head_dim other than hidden / heads, as in the real ones
    "phi3-longrope": lambda: t.Phi3Config(**SHAPE, rope_parameters=dict(_LONGROPE)),  # as Phi-4-mini has it
    "olmo2": lambda: t.Olmo2Config(**SHAPE),
    "smollm3": lambda: t.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1, 1], use_sliding_window=False),
    "gemma": lambda: t.GemmaConfig(**SHAPE, head_dim=16),
    "mistral-window": lambda: t.MistralConfig(**SHAPE, head_dim=16, sliding_window=24),
    "gemma2": lambda: t.Gemma2Config(**SHAPE, **_WINDOWED, sliding_window=32, query_pre_attn_scalar=16, **_CAPS),
    "gemma3": lambda: t.Gemma3TextConfig(
        **SHAPE, **_WINDOWED, sliding_window=96, query_pre_attn_scalar=16, rope_parameters=dict(_TWO_ROPES)
    ),
    "gpt-oss": lambda: t.GptOssConfig(
        **SHAPE, **_WINDOWED, sliding_window=16, num_local_experts=4, rope_parameters=dict(_YARN)
    ),
    "ministral": lambda: t.MinistralConfig(**SHAPE, **_WINDOWED, sliding_window=50),
    "cohere2": lambda: t.Cohere2Config(
        **SHAPE, layer_types=_WINDOWED["layer_types"], sliding_window=20, logit_scale=1.0
    ),
    "olmo3": lambda: t.Olmo3Config(**SHAPE, layer_types=_LAYERS, sliding_window=40),
    "exaone4": lambda: t.Exaone4Config(**SHAPE, **_WINDOWED, sliding_window=12),
    # Other heads in full layers, whose keys are their values, too; and an input of its own for every layer.
    "gemma4": lambda: t.Gemma4TextConfig(**SHAPE, **_GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4-shared": lambda: t.Gemma4TextConfig(  # its last two layers attend to what the first two keep
        **SHAPE, **_GEMMA4, num_kv_shared_layers=2, use_double_wide_mlp=True
    ),
    "minicpm3": lambda: t.MiniCPM3Config(**_LATENT, scale_emb=1, dim_model_base=64),
    "youtu": lambda: t.YoutuConfig(**_LATENT | {"kv_lora_rank": 48, "v_head_dim": 32}),  # as our own kernel takes it
    "deepseek-v2": lambda: t.DeepseekV2Config(
        **_LATENT | {"q_lora_rank": None}, **_ROUTED, n_shared_experts=1, first_k_dense_replace=1
    ),
    "deepseek-v3": lambda: t.DeepseekV3Config(
        **_LATENT,
        **_ROUTED,
        n_shared_experts=1,
        first_k_dense_replace=2,
        rope_parameters=_YARN | {"mscale_all_dim": 0.7},
    ),
    "glm4-moe-lite": lambda: t.Glm4MoeLiteConfig(**_LATENT, **_ROUTED, n_shared_experts=1),
    "glm": lambda: t.GlmConfig(**SHAPE, head_dim=16),  # rotates pairs side by side, of half a head
    "stablelm": lambda: t.StableLmConfig(**SHAPE, qk_layernorm=True),  # a quarter of a head
    "mixtral": lambda: t.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
}
# Those that differ from them in other modules only: each law runs over them, with fewer modes.
LIKE: dict[str, Callable[[], Any]] = {
    "llama-linear": lambda: t.LlamaConfig(**SHAPE, rope_parameters=dict(_LINEAR)),
    "llama-llama3": lambda: t.LlamaConfig(**SHAPE, rope_parameters=dict(_LLAMA3)),
    "mistral": lambda: t.MistralConfig(**SHAPE, head_dim=16, sliding_window=None),
    "qwen3-bias": lambda: t.Qwen3Config(**SHAPE, head_dim=16, attention_bias=True),
    "phi3": lambda: t.Phi3Config(**SHAPE),
    "granite": lambda: t.GraniteConfig(**SHAPE, attention_multiplier=0.2, residual_multiplier=0.8, logits_scaling=2.0),
    "qwen3-moe": lambda: t.Qwen3MoeConfig(**SHAPE, **_EXPERTS, head_dim=16, decoder_sparse_step=1),
    **{name: made(name, SHAPE) for name in MORE},
}
FAMILIES = KINDS | LIKE
# Some layers see no further back than a window, which is shorter than some chunks and longer than others.
WINDOWED = ("mistral-window", "gemma2", "gemma3", "gpt-oss", "ministral", "cohere2", "olmo3", "exaone4")
# Recurrent hybrids: nothing of them is moved, so the laws of fused modes are not theirs (tests/fusion/test_chain.py).
_DELTA = {
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
_INTERLEAVED = {  # M-RoPE, as its checkpoints have it
    **{"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_CONV_IN_SOME = ["conv", "full_attention", "conv", "full_attention"]
_MAMBA_IN_SOME = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_SHARED = {"shared_expert_intermediate_size": 64}
_NEMOTRON_H = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "n_routed_experts": 4}
_KIMI_LINEAR = {
    **{"linear_head_dim": 16, "linear_num_heads": 4},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
HYBRIDS: dict[str, Callable[[], Any]] = {
    "qwen3-next": lambda: t.Qwen3NextConfig(**SHAPE, **_EXPERTS, **_SHARED, **_DELTA, head_dim=16),
    "qwen3.5": lambda: t.Qwen3_5TextConfig(**SHAPE, **_DELTA, head_dim=16, rope_parameters=dict(_INTERLEAVED)),
    "qwen3.5-moe": lambda: t.Qwen3_5MoeTextConfig(**SHAPE, **_EXPERTS, **_SHARED, **_DELTA, head_dim=16),
    "lfm2": lambda: t.Lfm2Config(**SHAPE, layer_types=list(_CONV_IN_SOME)),
    "lfm2-moe": lambda: t.Lfm2MoeConfig(**SHAPE, **_EXPERTS, num_dense_layers=1, layer_types=list(_CONV_IN_SOME)),
    "lfm3": lambda: t.Lfm3Config(**SHAPE, layer_types=list(_CONV_IN_SOME)),
    "granite4": lambda: t.GraniteMoeHybridConfig(
        **SHAPE, **_MAMBA, num_local_experts=4, num_experts_per_tok=2, layer_types=list(_MAMBA_IN_SOME)
    ),
    "bamba": lambda: t.BambaConfig(**SHAPE, **_MAMBA, attn_layer_indices=[2]),
    "nemotron-h": lambda: t.NemotronHConfig(  # a layer of experts, which keeps nothing; no positions
        **SHAPE, **_NEMOTRON_H, head_dim=16, layer_types=["linear_attention", "moe", "full_attention", "mlp"]
    ),
    "falcon-h1": lambda: t.FalconH1Config(**SHAPE, **_MAMBA, mamba_d_ssm=128, head_dim=16),  # both in every layer
    "olmo-hybrid": lambda: t.OlmoHybridConfig(**SHAPE, **_DELTA),
    "kimi-linear": lambda: t.KimiLinearConfig(  # latents, in which no position is marked
        **_LATENT | {"q_lora_rank": None}, **_KIMI_LINEAR, layer_types=list(_MAMBA_IN_SOME)
    ),
    "jamba": lambda: t.JambaConfig(
        **SHAPE, num_experts=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False
    ),
}

# The tower of Kimi K2.5 has `blocks`, for which `transformers` puts `layers` when it reads a checkpoint; when it saves
# one, it undoes that to the text model's layers, too. No checkpoint that was published has them so.
SAVED_OTHERWISE = {"kimi-k2.5": ("language_model.model.blocks.", "language_model.model.layers.")}

# What machine code for whole steps and layers is made for, experts left aside.
NATIVE = (
    *("llama", "llama-linear", "llama-llama3", "llama-yarn", "llama-dynamic", "mistral", "qwen2", "qwen3"),
    *("qwen3-bias", "phi3", "phi3-longrope", "olmo2", "granite", "smollm3", "gemma", "seed-oss"),
    *("mistral-window", "ministral", "gemma3"),
)


def tiny_model(name: str, dtype: str = "float32", seed: int = 0) -> Any:
    """Build one of `FAMILIES`, or a whole wrapper, with large weights: attention is peaked, and prompts differ in their
    logits.

    The same weights for the same seed, in every dtype up to rounding; the caller's random state is left unchanged.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = filled(_built(name))
        with torch.no_grad():
            if name == "gemma":  # it multiplies embeddings by √hidden itself
                model.get_input_embeddings().weight.mul_(model.config.hidden_size**-0.5)
    for weight in model.parameters():  # `.to(dtype)` would round the rotary frequencies, too
        weight.data = weight.data.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    return model.eval().requires_grad_(False)


def filled(model: Any) -> Any:
    with torch.no_grad():
        for path, weight in sorted(model.named_parameters()):
            _fill(path, weight)
    return model


def _built(name: str) -> Any:
    if name in FAMILIES | HYBRIDS:
        return t.AutoModelForCausalLM.from_config((FAMILIES | HYBRIDS)[name](), dtype=torch.float32)
    from tests.wrappers import HYBRID_WRAPPERS, WRAPPERS

    return t.AutoModelForImageTextToText.from_config((WRAPPERS | HYBRID_WRAPPERS)[name](), dtype=torch.float32)


def _fill(path: str, weight: torch.Tensor) -> None:
    """Scores of standard deviation about 2 (projections, or the norms after them), logits of about 3."""
    if "q_norm" in path or "k_norm" in path:
        weight.normal_(1.5, 0.1)
    elif "norm" in path:
        weight.add_(torch.randn_like(weight) * 0.1)
    elif path.endswith("bias"):
        weight.normal_(0, 0.3)
    elif "embed" in path:
        weight.normal_(0, 1)
    else:
        gains = {"lm_head": 3.0, "q_proj": 1.5, "k_proj": 1.5, "qkv_proj": 1.5}
        gain = next((gain for part, gain in gains.items() if part in path), 1.0)
        weight.normal_(0, gain / weight.shape[-1] ** 0.5)


def tiny_tokenizer(chat: bool = True) -> Any:
    """Byte-level BPE of at most 512 tokens with BOS, EOS and a chat template; it can spell any text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        _LINES,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=[BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny(
    name: str, folder: Path, tokenizer: bool = True, *, dtype: str = "float32", seed: int = 0, chat: bool = True
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model(name, dtype, seed).save_pretrained(folder)
    if change := SAVED_OTHERWISE.get(name):
        path = folder / "model.safetensors"
        save_file({key.replace(*change): weight for key, weight in load_file(path).items()}, path, {"format": "pt"})
    if tokenizer:
        tiny_tokenizer(chat).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


_LINES = [
    "The tide rises and falls twice a day along most coasts, and the water follows the moon.",
    "Bread is made from flour, water and salt; the dough rises in a warm place and is baked in the oven.",
    "Who built the first mill on the river, and when was it finished? It was finished in 1874.",
    "Answer the question with a short answer copied from the passages. Question: Answer:",
    "조수는 하루에 두 번 오르내리며 바닷물은 달을 따라 움직인다.",
    "빵은 밀가루와 물과 소금으로 만들고, 반죽은 따뜻한 곳에서 부푼다.",
    "강가의 첫 방앗간은 누가 지었고 언제 완성되었는가? 1874년에 완성되었다.",
]
