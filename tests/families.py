"""Tiny random models of every supported family, for tests: seconds to build, and different enough to tell apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

VOCAB = 512
MAX_POSITIONS = 2048
BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
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
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama-linear": lambda: LlamaConfig(**_SHAPE, rope_parameters=dict(_LINEAR)),
    "llama-llama3": lambda: LlamaConfig(**_SHAPE, rope_parameters=dict(_LLAMA3)),
    "llama-yarn": lambda: LlamaConfig(**_SHAPE, rope_parameters=dict(_YARN)),
    "llama-dynamic": lambda: LlamaConfig(**_SHAPE, rope_parameters=dict(_DYNAMIC)),
    "mistral": lambda: MistralConfig(**_SHAPE, head_dim=16, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=32),  # head_dim other than hidden / heads, as in the real ones
    "qwen3-bias": lambda: Qwen3Config(**_SHAPE, head_dim=16, attention_bias=True),
    "phi3": lambda: Phi3Config(**_SHAPE),
    "phi3-longrope": lambda: Phi3Config(**_SHAPE, rope_parameters=dict(_LONGROPE)),  # as Phi-4-mini has it
    "olmo2": lambda: Olmo2Config(**_SHAPE),
    "granite": lambda: GraniteConfig(**_SHAPE, attention_multiplier=0.2, residual_multiplier=0.8, logits_scaling=2.0),
    "smollm3": lambda: SmolLM3Config(**_SHAPE, no_rope_layers=[1, 0, 1, 1], use_sliding_window=False),
    "gemma": lambda: GemmaConfig(**_SHAPE, head_dim=16),
    "mixtral": lambda: MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_SHAPE, **_EXPERTS, head_dim=16, decoder_sparse_step=1),
}


def tiny_model(name: str, dtype: str = "float32", seed: int = 0) -> Any:
    """A model of one of `FAMILIES` with weights so large that attention is peaked and prompts differ in their logits.

    The same weights for the same seed, in every dtype up to rounding; the caller's random state is left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(FAMILIES[name](), dtype=torch.float32)
        with torch.no_grad():
            for path, weight in sorted(model.named_parameters()):
                _fill(path, weight)
            if name == "gemma":  # it multiplies embeddings by √hidden itself
                model.get_input_embeddings().weight.mul_(model.config.hidden_size**-0.5)
    return _rounded(model, getattr(torch, dtype)).eval().requires_grad_(False)


def _rounded(model: Any, dtype: torch.dtype) -> Any:
    """Weights only, as `from_pretrained` does: `.to(dtype)` would round the rotary frequencies too."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    model.config.dtype = dtype
    return model


def _fill(path: str, weight: torch.Tensor) -> None:
    """Scores of standard deviation about 2 (projections, or the norms behind them), logits of about 3."""
    if "q_norm" in path or "k_norm" in path:
        weight.normal_(1.5, 0.1)
    elif "norm" in path:
        weight.add_(torch.randn_like(weight) * 0.1)
    elif path.endswith("bias"):
        weight.normal_(0, 0.3)
    elif "embed" in path:
        weight.normal_(0, 1)
    else:
        weight.normal_(0, _gain(path) / weight.shape[-1] ** 0.5)


def _gain(path: str) -> float:
    if "lm_head" in path:
        return 3.0
    return 1.5 if any(part in path for part in ("q_proj", "k_proj", "qkv_proj")) else 1.0


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
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny(
    name: str, folder: Path, tokenizer: bool = True, *, dtype: str = "float32", seed: int = 0, chat: bool = True
) -> Path:
    """Write `tiny_model(name)` as a local model folder that `resolve` and `load_model` take; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model(name, dtype, seed).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer(chat).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change settings in a saved model's config.json."""
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
