"""Configuration of a GGUF file's model for `transformers`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.checkpoint.gguf.header import OTHER_MODEL, GgufHeader, TensorInfo
from kvtool.core.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

GPT_OSS, _GEMMA4 = "gpt-oss", "gemma4"
# Names in the file that the reader does not know, and the configuration's names.
_TOLD = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_epsilon": "norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# All values of gpt-oss: the reader of `transformers` fails on this architecture's numbers.
_GPT_OSS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "expert_feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
_OWN_SCALE = {"gemma2": 46, "gemma3": 62}  # layers of the model that scales by hidden size / heads


def model_config(gguf: Path, header: GgufHeader, outline: Path) -> Any:
    """Build a file's configuration; `outline` is its own, next to which there is no configuration."""
    from transformers import CONFIG_MAPPING

    read = _read(gguf, header, outline)
    kind = CONFIG_MAPPING[read.pop("model_type")]
    stated = _gemma4(header) if header.architecture == _GEMMA4 else _stated(header, kind)
    config = kind(**{"pad_token_id": None, "dtype": "bfloat16"} | read | stated)
    restore_rope(gguf, header, config)
    # No file states the scale of scores of Gemma's models of 27 billion weights: llama.cpp, too, counts their layers.
    if header.value("block_count") == _OWN_SCALE.get(header.architecture, 0):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    return config


def _read(gguf: Path, header: GgufHeader, outline: Path) -> dict[str, Any]:
    import transformers

    if header.architecture == GPT_OSS:
        read = {ours: header.value(theirs) for theirs, ours in _GPT_OSS.items() if header.value(theirs) is not None}
        ids = {f"{name}_token_id": header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        return {"model_type": "gpt_oss", "vocab_size": header.metadata.get("tokenizer.ggml.tokens"), **ids, **read}
    known = _architectures()
    if header.architecture not in known:
        raise ModelError(
            f"{gguf} holds a model of the architecture {header.architecture!r}, whose GGUF files "
            f"transformers {transformers.__version__} does not read; that would need a reader that knows its names and "
            f"layouts, as it does of {', '.join(sorted(known))}",
            OTHER_MODEL,
        )
    read, _ = transformers.PreTrainedConfig.get_config_dict(str(outline.parent), gguf_file=outline.name)
    return {"vocab_size": header.metadata.get("tokenizer.ggml.tokens")} | dict(read)


def _architectures() -> set[str]:
    from gguf.constants import MODEL_ARCH_NAMES
    from transformers import CONFIG_MAPPING
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    spelled = {
        name.replace("-", "").replace("_", "") for name in GGUF_SUPPORTED_ARCHITECTURES if name in CONFIG_MAPPING
    }
    legacy = {name for name in MODEL_ARCH_NAMES.values() if name.replace("-", "").replace("_", "") in spelled}
    return legacy | set(GGUF_CONFIG_ARCHS) | {GPT_OSS, _GEMMA4}


def _stated(header: GgufHeader, kind: Any) -> dict[str, Any]:
    known = kind.__dataclass_fields__
    stated = {ours: header.value(theirs) for theirs, ours in _TOLD.items() if ours in known}
    return {name: value or None for name, value in stated.items() if value is not None}


def _gemma4(header: GgufHeader) -> dict[str, Any]:
    windowed = [bool(one) for one in header.value("attention.sliding_window_pattern")]
    heads, widths = header.value("attention.head_count_kv"), header.value("feed_forward_length")
    full = windowed.index(False)
    experts = {
        "enable_moe_block": True,
        "num_experts": header.value("expert_count"),
        "top_k_experts": header.value("expert_used_count"),
        "moe_intermediate_size": header.value("expert_feed_forward_length"),
    }
    alike = f"blk.{full}.attn_v.weight" not in header.tensors  # keys that are their values, too
    return {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
        "head_dim": header.value("attention.key_length_swa"),
        "global_head_dim": header.value("attention.key_length"),
        "num_key_value_heads": heads[windowed.index(True)] if isinstance(heads, list) else heads,
        "num_global_key_value_heads": heads[full] if isinstance(heads, list) else None,
        "attention_k_eq_v": alike,
        "num_kv_shared_layers": header.value("attention.shared_kv_layers") or 0,
        "intermediate_size": widths[0] if isinstance(widths, list) else widths,
        "use_double_wide_mlp": isinstance(widths, list) and widths[-1] != widths[0],
        "hidden_size_per_layer_input": header.value("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": header.metadata.get("tokenizer.ggml.tokens"),
        "final_logit_softcapping": header.value("final_logit_softcapping"),
        **(experts if header.value("expert_count") else {}),
    }


POSITIONS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_ORIGINAL = "original_max_position_embeddings"
_LLAMA3_FACTORS = (8.0, 32.0)  # Llama 3.1 and 3.2
_LLAMA3_REST = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL: 8192}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def restore_rope(gguf: Path, header: GgufHeader, config: Any) -> None:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    whole = rope.get(_FULL)
    stated = (whole if isinstance(whole, dict) else rope) | _scaling(gguf, header, config)
    if not isinstance(whole, dict):
        config.rope_parameters = stated | _base(header) | _part(header, config)
        if hasattr(config, _ORIGINAL):  # Phi-3's own, which takes precedence over that of its RoPE
            setattr(config, _ORIGINAL, stated.get(_ORIGINAL, config.max_position_embeddings))
        return
    near = rope[_SLIDING] | _base(header, "_swa")
    config.rope_parameters = {_SLIDING: near, _FULL: stated | _base(header)}  # Gemma 3 and 4


def _base(header: GgufHeader, of: str = "") -> dict[str, Any]:
    base = header.value(f"rope.freq_base{of}")
    return {} if base is None else {"rope_theta": float(base)}


def _part(header: GgufHeader, config: Any) -> dict[str, Any]:
    rotated = header.value("rope.dimension_count")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {} if rotated in (None, 0, head) else {"partial_rotary_factor": rotated / head}


def _scaling(gguf: Path, header: GgufHeader, config: Any) -> dict[str, Any]:
    if divisors := header.tensors.get(POSITIONS[0]):
        stored = _numbers(gguf, divisors)
        return _proportional(stored) or _llama3(gguf, header, stored)
    kind = header.value("rope.scaling.type")
    if kind == "longrope" or any(name in header.tensors for name in POSITIONS[1:]):
        return _longrope(gguf, header)
    if kind not in ("linear", "yarn"):
        return {}
    scaling = {"rope_type": kind, "factor": float(header.value("rope.scaling.factor") or 1.0)}
    if original := header.value("rope.scaling.original_context_length"):
        scaling[_ORIGINAL] = original
    return scaling


def _longrope(gguf: Path, header: GgufHeader) -> dict[str, Any]:
    """Read both sets of factors, which are tensors, and the reach of the short ones from the metadata (Phi-3, Phi-4).

    Longer prompts are refused as a folder's are (`context_limit`).
    """
    long, short = (header.tensors.get(name) for name in POSITIONS[1:])
    original = header.value("rope.scaling.original_context_length")
    if long is None or short is None or not original:
        needed = "both rope_factors_long and rope_factors_short, and the length that the short ones are for"
        raise ModelError(f"{gguf} uses longrope, and lacks what that takes: {needed}", OTHER_MODEL)
    factors = {"short_factor": _numbers(gguf, short).tolist(), "long_factor": _numbers(gguf, long).tolist()}
    scaling = {"rope_type": "longrope", **factors, _ORIGINAL: original}
    if grown := header.value("rope.scaling.attn_factor"):
        scaling["attention_factor"] = float(grown)
    return scaling


def _proportional(stored: npt.NDArray[np.float32]) -> dict[str, Any]:
    rotated = int((stored == 1.0).sum())
    if not 0 < rotated < len(stored) or (stored[:rotated] != 1.0).any() or (stored[rotated:] < 1e20).any():
        return {}
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(stored)}


def _llama3(gguf: Path, header: GgufHeader, stored: npt.NDArray[np.float32]) -> dict[str, Any]:
    import numpy as np

    base = float(header.value("rope.freq_base") or 10_000.0)
    for factor in _LLAMA3_FACTORS:
        wanted = llama3_divisors(base, len(stored), factor)
        if len(stored) and np.allclose(stored, wanted, rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3_REST}
    needed = "that would need one of Llama 3's scalings, or a file that says which it is"
    raise ModelError(f"{gguf} scales its RoPE frequencies in a way that is not known; {needed}", OTHER_MODEL)


def llama3_divisors(base: float, pairs: int, factor: float) -> list[float]:
    """Compute the divisors of llama.cpp's `rope_freqs`, as `_compute_llama3_parameters` in transformers."""
    low, high = _LLAMA3_REST["low_freq_factor"], _LLAMA3_REST["high_freq_factor"]
    turns = [_LLAMA3_REST[_ORIGINAL] / (2 * math.pi * base ** (i / pairs)) for i in range(pairs)]
    smooth = [min(max((t - low) / (high - low), 0.0), 1.0) for t in turns]
    return [1.0 / ((1.0 - s) / factor + s) for s in smooth]


def _numbers(gguf: Path, tensor: TensorInfo) -> npt.NDArray[np.float32]:
    import numpy as np

    return np.fromfile(gguf, np.float32, tensor.nbytes // 4 if tensor.kind == 0 else 0, offset=tensor.start)
