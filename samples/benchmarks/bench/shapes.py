"""Build models of well-known sizes with random weights: speed does not depend on the values of weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvtool.core.checkpoint.files import ModelFiles
from kvtool.core.checkpoint.load import Loaded, own_dtype, resolve_device
from kvtool.core.common.collecting import quiet
from kvtool.core.common.machine import is_out_of_memory
from kvtool.core.errors import KvtoolError, UsageError, did_you_mean

_SPREAD = 0.02  # of all weights, as the models begin their training with
PUBLISHED = "bfloat16"  # that all of SHAPES were published in
_BLOCK = 2**20 + 7  # random numbers that are repeated; odd, so that the rows of a weight differ


_ROPE = {"rope_type": "default"}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The published architecture of a model.

    Attributes
    ----------
    config : the class of its configuration in `transformers`.
    context : the longest prompt in tokens (`max_position_embeddings`).
    rope : RoPE parameters, without theta; or those of each type of layer, with it.
    tied : the LM head is the embedding.
    more : what else the configuration states.
    """

    config: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    context: int
    theta: float
    rope: Mapping[str, Any] = field(default_factory=lambda: _ROPE)
    epsilon: float = 1e-5
    tied: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)

    def _ropes(self) -> dict[str, Any]:
        several = any(isinstance(one, Mapping) for one in self.rope.values())
        return dict(self.rope) if several else {**self.rope, "rope_theta": self.theta}

    def make(self) -> Any:
        """The architecture as a `transformers` configuration."""
        import transformers

        return getattr(transformers, self.config)(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.mlp,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.context,
            rms_norm_eps=self.epsilon,
            tie_word_embeddings=self.tied,
            rope_parameters=self._ropes(),
            **self.more,
        )


def _llama3(factor: float) -> dict[str, Any]:
    return {**_LLAMA3_ROPE, "factor": factor}


# DeepSeek-V2-Lite's: 64 experts of which each token takes 6 and all take 2, its first layer without.
_V2_LITE: dict[str, Any] = {
    **{"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    **{"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1408},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}
_V2_YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def _gemma3(layers: int, window: int) -> dict[str, Any]:
    """Gemma 3: five windowed layers, then a full one."""
    types = [_FULL if layer % 6 == 5 else _SLIDING for layer in range(layers)]
    return {"sliding_window": window, "layer_types": types, "query_pre_attn_scalar": 256}


def _gemma3_ropes(factor: float) -> dict[str, Any]:
    """Gemma 3's full layers have a longer base, and some sizes stretch their positions."""
    stretched = {"rope_type": "linear", "factor": factor} if factor else _ROPE
    return {_SLIDING: {**_ROPE, "rope_theta": 1e4}, _FULL: {**stretched, "rope_theta": 1e6}}


# Gemma 4: four or five windowed layers, then a full one with wider heads, of which a quarter turns with the position.
_GEMMA4_ROPES = {
    _SLIDING: {**_ROPE, "rope_theta": 1e4},
    _FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def _gemma4(layers: int, every: int, window: int, inputs: int) -> dict[str, Any]:
    """Each layer may have an input of its own, of so many numbers a token."""
    types = [_FULL if layer % every == every - 1 else _SLIDING for layer in range(layers)]
    return {
        **{"layer_types": types, "sliding_window": window, "global_head_dim": 512, "final_logit_softcapping": 30.0},
        **{"hidden_size_per_layer_input": inputs, "vocab_size_per_layer_input": 262144},
    }


# The small ones' last layers keep no keys and values of their own, and E2B's have twice the MLP. Full layers of the
# large ones have fewer heads, and keys that are their values, too; 26B has an MLP and 128 experts (8 a token).
_E2B = _gemma4(35, 5, 512, 256) | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True}
_E4B = _gemma4(42, 6, 512, 256) | {"num_kv_shared_layers": 18}
_31B = _gemma4(60, 6, 1024, 0) | {"attention_k_eq_v": True, "num_global_key_value_heads": 4}
_26B = _gemma4(30, 6, 1024, 0) | {
    **{"attention_k_eq_v": True, "num_global_key_value_heads": 2},
    **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
}

_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS = {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
_NO_WINDOW, _NO_BIAS = {"use_sliding_window": False}, {"attention_bias": False}


def _qwen3(hidden: int, layers: int, heads: int, mlp: int, tied: bool = False) -> Shape:
    sizes = (hidden, layers, heads, 8, 128, mlp, 151936, 40960, 1e6)
    return Shape("Qwen3Config", *sizes, epsilon=1e-6, tied=tied, more=_NO_WINDOW | _NO_BIAS)


SHAPES: dict[str, Shape] = {
    "tiny": Shape("LlamaConfig", 64, 4, 4, 2, 16, 128, 512, 131072, 5e5),
    # Qwen/Qwen2.5-0.5B: biases on Q, K and V, as all of its family.
    "qwen2.5-0.5b": Shape("Qwen2Config", 896, 24, 14, 2, 64, 4864, 151936, 32768, 1e6, epsilon=1e-6, more=_NO_WINDOW),
    # Qwen/Qwen3-0.6B, 1.7B, 4B, 8B, 14B and 32B.
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600),
    # meta-llama/Llama-3.2-1B.
    "llama-3.2-1b": Shape("LlamaConfig", 2048, 16, 32, 8, 64, 8192, 128256, 131072, 5e5, _llama3(32.0), more=_NO_BIAS),
    # mistralai/Mistral-7B-v0.3: no sliding window.
    "mistral-7b": Shape(
        "MistralConfig", 4096, 32, 32, 8, 128, 14336, 32768, 32768, 1e6, tied=False, more={"sliding_window": None}
    ),
    # google/gemma-3-1b-it.
    "gemma-3-1b": Shape(
        "Gemma3TextConfig",
        *(1152, 26, 4, 1, 256, 6912, 262144, 32768, 1e6, _gemma3_ropes(0.0)),
        epsilon=1e-6,
        more=_gemma3(26, 512),
    ),
    # The text of google/gemma-3-4b-it, 12b and 27b.
    "gemma-3-4b": Shape(
        "Gemma3TextConfig",
        *(2560, 34, 8, 4, 256, 10240, 262208, 131072, 1e6, _gemma3_ropes(8.0)),
        epsilon=1e-6,
        more=_gemma3(34, 1024),
    ),
    "gemma-3-12b": Shape(
        "Gemma3TextConfig",
        *(3840, 48, 16, 8, 256, 15360, 262208, 131072, 1e6, _gemma3_ropes(8.0)),
        epsilon=1e-6,
        more=_gemma3(48, 1024),
    ),
    "gemma-3-27b": Shape(
        "Gemma3TextConfig",
        *(5376, 62, 32, 16, 128, 21504, 262208, 131072, 1e6, _gemma3_ropes(8.0)),
        epsilon=1e-6,
        more=_gemma3(62, 1024) | {"query_pre_attn_scalar": 168},
    ),
    # The text of google/gemma-4-E2B-it, E4B, 26B-A4B and 31B.
    "gemma-4-e2b": Shape(
        "Gemma4TextConfig", 1536, 35, 8, 1, 256, 6144, 262144, 131072, 1e6, _GEMMA4_ROPES, epsilon=1e-6, more=_E2B
    ),
    "gemma-4-e4b": Shape(
        "Gemma4TextConfig", 2560, 42, 8, 2, 256, 10240, 262144, 131072, 1e6, _GEMMA4_ROPES, epsilon=1e-6, more=_E4B
    ),
    "gemma-4-26b-a4b": Shape(
        "Gemma4TextConfig", 2816, 30, 16, 8, 256, 2112, 262144, 262144, 1e6, _GEMMA4_ROPES, epsilon=1e-6, more=_26B
    ),
    "gemma-4-31b": Shape(
        "Gemma4TextConfig", 5376, 60, 32, 16, 256, 21504, 262144, 262144, 1e6, _GEMMA4_ROPES, epsilon=1e-6, more=_31B
    ),
    # openai/gpt-oss-20b: full and windowed layers take turns.
    "gpt-oss-20b": Shape(
        "GptOssConfig",
        *(2880, 24, 64, 8, 64, 2880, 201088, 131072, 150000.0, _GPT_OSS_YARN),
        tied=False,
        more=_GPT_OSS,
    ),
    # Six of its 24 layers, which fit a machine of 24 GB.
    "gpt-oss-20b-6": Shape(
        "GptOssConfig",
        *(2880, 6, 64, 8, 64, 2880, 201088, 131072, 150000.0, _GPT_OSS_YARN),
        tied=False,
        more=_GPT_OSS,
    ),
    # deepseek-ai/DeepSeek-V2-Lite.
    "deepseek-v2-lite": Shape(
        "DeepseekV2Config",
        *(2048, 27, 16, 16, 64, 10944, 102400, 163840, 1e4, _V2_YARN),
        epsilon=1e-6,
        tied=False,
        more=_V2_LITE | _NO_BIAS,
    ),
    # meta-llama/Llama-3.1-8B.
    "llama-3.1-8b": Shape(
        "LlamaConfig", 4096, 32, 32, 8, 128, 14336, 128256, 131072, 5e5, _llama3(8.0), tied=False, more=_NO_BIAS
    ),
}


def shape_config(name: str) -> Any:
    """The published architecture of a named shape, as a `transformers` configuration.

    Raises
    ------
    UsageError : no such shape.
    """
    shape = SHAPES.get(name)
    if shape is None:
        known = f"known: {', '.join(SHAPES)}"
        guess = did_you_mean(name, SHAPES)
        raise UsageError(f"there is no shape {name!r}", f"{guess} {known}" if guess else known)
    return shape.make()


def parameter_count(name: str) -> int:
    """Parameters of a shape, tied ones once; takes no memory."""
    return sum(weight.numel() for weight in _without_memory(shape_config(name), torch.bfloat16).parameters())


def shape_dtype(device: str) -> str:
    """Return the `auto` dtype for a shape: the one that a query would use for its checkpoint."""
    return own_dtype(PUBLISHED, device)


def build_shape(name: str, device: str = "auto", dtype: str = "auto", seed: int = 0) -> Loaded:
    """A model of a named shape with random weights, made on its device; it has no tokenizer and no files.

    Parameters
    ----------
    dtype : `float32`, `bfloat16` or `float16`; `auto`: what a query takes of a bfloat16 checkpoint on this device.

    Raises
    ------
    UsageError : no such shape or device.
    KvtoolError : out of memory.
    """
    started = time.perf_counter()
    config, place = shape_config(name), resolve_device(device)
    kind = shape_dtype(place) if dtype == "auto" else dtype
    with _enough_memory(name, kind):
        model = _without_memory(config, getattr(torch, kind)).to_empty(device=place)
        model.tie_weights()
        _compute_rotary(model, config, place)
        _fill(model, place, seed)
    return Loaded(
        model=model.eval().requires_grad_(False),
        tokenizer=None,
        files=ModelFiles(name, Path(), "shape"),
        device=place,
        dtype=kind,
        fingerprint=f"shape {name} {kind} {seed}",
        load_ms=(time.perf_counter() - started) * 1e3,
    )


def _without_memory(config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def _compute_rotary(model: Any, config: Any, device: str) -> None:
    """Frequencies are buffers, not weights: a model made without memory has none yet."""
    base = model.get_decoder()
    base.rotary_emb = type(base.rotary_emb)(config).to(device)
    for module in model.modules():  # what embeddings are multiplied by is one, too (Gemma)
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale.fill_(module.scalar_embed_scale)


@torch.no_grad()
def _fill(model: Any, device: str, seed: int) -> None:
    """Norms 1, all else random. One block serves all weights: to draw 8e9 numbers takes a minute."""
    draw = torch.Generator().manual_seed(seed)
    block = (torch.randn(_BLOCK, generator=draw, dtype=torch.float32) * _SPREAD).to(model.dtype).to(device)
    for path, weight in model.named_parameters():
        if path.endswith("norm.weight"):
            weight.fill_(1)
            continue
        flat = weight.view(-1)
        for start in range(0, len(flat), _BLOCK):
            part = flat[start : start + _BLOCK]
            part.copy_(block[: len(part)])


@contextmanager
def _enough_memory(name: str, kind: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        need = getattr(torch, kind).itemsize * parameter_count(name) / 1e9
        raise KvtoolError(
            f"not enough memory for the shape {name} ({need:.1f} GB in {kind})", "choose a smaller --shape"
        ) from error
