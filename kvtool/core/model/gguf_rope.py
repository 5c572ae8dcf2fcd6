"""How a GGUF file scales its positions, which `transformers`' reader passes over in silence (checked with 5.23)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtool.core.errors import ModelError
from kvtool.core.model.gguf_header import GgufHeader, TensorInfo

POSITIONS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
_ORIGINAL = "original_max_position_embeddings"
_LLAMA3_FACTORS = (8.0, 32.0)  # Llama 3.1 and 3.2
_LLAMA3_REST = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL: 8192}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_OTHER_MODEL = "use the model's original safetensors, or another model"


def restore_rope(gguf: Path, header: GgufHeader, config: Any) -> None:
    """Set a configuration's RoPE to what the file says: base, rotated part of a head, and scaling.

    Raises
    ------
    ModelError : positions are scaled in a way that no configuration can say.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    whole = rope.get(_FULL)
    told = (whole if isinstance(whole, dict) else rope) | _scaling(gguf, header, config)
    if not isinstance(whole, dict):
        config.rope_parameters = told | _base(header) | _part(header, config)
        if hasattr(config, _ORIGINAL):  # Phi-3's own, which goes before that of its RoPE
            setattr(config, _ORIGINAL, told.get(_ORIGINAL, config.max_position_embeddings))
        return
    near = rope[_SLIDING] | _base(header, "_swa")
    config.rope_parameters = {_SLIDING: near, _FULL: told | _base(header)}  # Gemma 3 and 4


def _base(header: GgufHeader, of: str = "") -> dict[str, Any]:
    base = header.value(f"rope.freq_base{of}")
    return {} if base is None else {"rope_theta": float(base)}


def _part(header: GgufHeader, config: Any) -> dict[str, Any]:
    """The share of a head that is rotated, where that is not all of it."""
    rotated = header.value("rope.dimension_count")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {} if rotated in (None, 0, head) else {"partial_rotary_factor": rotated / head}


def _scaling(gguf: Path, header: GgufHeader, config: Any) -> dict[str, Any]:
    """The scaling of the RoPE that layers have which see all."""
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
    """Both sets of factors lie in tensors of their own, how far the short ones reach in the metadata (Phi-3, Phi-4).

    Prompts longer than that are refused as a folder's are (`context_limit`).
    """
    long, short = (header.tensors.get(name) for name in POSITIONS[1:])
    original = header.value("rope.scaling.original_context_length")
    if long is None or short is None or not original:
        needed = "both rope_factors_long and rope_factors_short, and the length that the short ones are for"
        raise ModelError(f"{gguf} uses longrope, and lacks what that takes: {needed}", _OTHER_MODEL)
    factors = {"short_factor": _numbers(gguf, short).tolist(), "long_factor": _numbers(gguf, long).tolist()}
    scaling = {"rope_type": "longrope", **factors, _ORIGINAL: original}
    if grown := header.value("rope.scaling.attn_factor"):
        scaling["attention_factor"] = float(grown)
    return scaling


def _proportional(stored: npt.NDArray[np.float32]) -> dict[str, Any]:
    """Gemma 4's: pairs that are rotated as ever, then pairs whose positions are divided away."""
    rotated = int((stored == 1.0).sum())
    if not 0 < rotated < len(stored) or (stored[:rotated] != 1.0).any() or (stored[rotated:] < 1e20).any():
        return {}
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(stored)}


def _llama3(gguf: Path, header: GgufHeader, stored: npt.NDArray[np.float32]) -> dict[str, Any]:
    """Find out which of the published Llama 3 scalings the stored frequency divisors are."""
    base = float(header.value("rope.freq_base") or 10_000.0)
    for factor in _LLAMA3_FACTORS:
        wanted = llama3_divisors(base, len(stored), factor)
        if len(stored) and np.allclose(stored, wanted, rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3_REST}
    needed = "that would need one of Llama 3's scalings, or a file that says which it is"
    raise ModelError(f"{gguf} scales its RoPE frequencies in a way that is not known; {needed}", _OTHER_MODEL)


def llama3_divisors(base: float, pairs: int, factor: float) -> list[float]:
    """The divisors of llama.cpp's `rope_freqs`, from `_compute_llama3_parameters` in transformers."""
    low, high = _LLAMA3_REST["low_freq_factor"], _LLAMA3_REST["high_freq_factor"]
    turns = [_LLAMA3_REST[_ORIGINAL] / (2 * math.pi * base ** (i / pairs)) for i in range(pairs)]
    smooth = [min(max((t - low) / (high - low), 0.0), 1.0) for t in turns]
    return [1.0 / ((1.0 - s) / factor + s) for s in smooth]


def _numbers(gguf: Path, tensor: TensorInfo) -> npt.NDArray[np.float32]:
    """A tensor of float32 numbers; none of another kind."""
    with gguf.open("rb") as file:
        file.seek(tensor.start)
        return (
            np.frombuffer(file.read(tensor.nbytes), dtype=np.float32) if tensor.kind == 0 else np.empty(0, np.float32)
        )
