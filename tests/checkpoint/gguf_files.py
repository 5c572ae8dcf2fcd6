"""GGUF files for tests: the tiny llama of `families`, changed as a test wants it; and families of `gguf_models`.

The latter are as llama.cpp's converter and quantiser make them. What these do to a family is written here a second
time, from their side: which names, and which rows in which order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType

from kvtool.core.checkpoint.gguf.folder import llama3_divisors
from tests.checkpoint.gguf_models import InGguf
from tests.families import filled, tiny_model, tiny_tokenizer
from tests.kernels.linear.matrices import HALVES


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp keeps the two halves of a rotary pair side by side (convert_hf_to_gguf.py, `permute`)."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, rows, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    *,
    tensors: dict[str, Any] | None = None,
    drop: str = "",
    kinds: dict[str, str] | None = None,
    **metadata: Any,
) -> Path:
    """The tiny llama of `families`, rounded to bfloat16, as GGUF; with changes.

    `kinds`: how matrices are quantised whose names end so, by GGUF's name of it; "": all others.
    """
    model = tiny_model("llama", "bfloat16")
    config, architecture = model.config, metadata.pop("architecture", "llama")
    own = _sizes(config) | {"rope.dimension_count": 16, "rope.freq_base": 10_000.0}
    own |= {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in own.items():
        add_value(writer, f"{architecture}.{key}", metadata.pop(key, value))
    for key, value in metadata.items():
        add_value(writer, key.replace("__", "."), value)
    add_tokenizer(writer, tiny_tokenizer())
    for name, tensor in {**tiny_tensors(model), **(tensors or {})}.items():
        if name != drop:
            add_tensor(writer, name, np.ascontiguousarray(tensor, dtype=np.float32), kinds or {})
    finish(writer)
    return path


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", 256),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 2,
        "vocab_size": config.vocab_size,
    }


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {list: writer.add_array, bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    adders.get(type(value), writer.add_float32)(key, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Any, kinds: dict[str, str]) -> None:
    kind = next((kind for ending, kind in kinds.items() if name.endswith(ending)), "F32")
    if tensor.ndim < 2 or kind == "F32":
        writer.add_tensor(name, tensor)
        return
    stored = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(tensor, stored), raw_dtype=stored)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    vocabulary = tokenizer.get_vocab()
    words = sorted(vocabulary, key=vocabulary.get)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([3 if i < 5 else 1 for i in range(len(words))])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template(tokenizer.chat_template)


def tiny_tensors(model: Any) -> dict[str, Any]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    tensors = {}
    for name, tensor in model.state_dict().items():
        base, weight = name.removesuffix(".weight"), tensor.float().numpy()
        turned = heads.get(base.rpartition(".")[2])
        tensors[f"{names.get_name(base)}.weight"] = interleaved(weight, turned) if turned else weight
    return tensors


Array = np.ndarray[Any, Any]
_NORMS_BY_ONE = ("gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe")  # whose weights are kept with 1 added
_TIGHT = {"q_proj": "Q4_K", "v_proj": "Q6_K", "down_proj": "Q5_K", "embed_tokens": "Q8_0"}


def written(path: Path, family: InGguf, more: Mapping[str, Array] | None = None) -> Any:
    """Write a family's file, with `more` tensors; return its model, float32, with the weights that the file has."""
    torch.manual_seed(0)
    model = filled(transformers.AutoModelForCausalLM.from_config(family.config(), dtype=torch.float32)).eval()
    for name, scalar in model.named_buffers():
        if name.endswith(("layer_scalar", "e_score_correction_bias")):
            scalar.uniform_(0.5, 1.0)
    writer = gguf.GGUFWriter(path, family.architecture)
    for key, value in (_metadata(family, model.config) | dict(family.metadata)).items():
        add_value(writer, f"{family.architecture}.{key}", value)
    add_tokenizer(writer, tiny_tokenizer())
    _add_weights(writer, family, model)
    for name, tensor in (_positions(family, model.config) | dict(more or {})).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return model.requires_grad_(False)


def _metadata(family: InGguf, config: Any) -> dict[str, Any]:
    eps = {"starcoder2": "norm_epsilon", "stablelm": "layer_norm_eps", "nemotron": "norm_eps", "lfm2": "norm_eps"}
    plain = family.architecture in ("starcoder2", "stablelm", "nemotron")
    norm = "attention.layer_norm_epsilon" if plain else "attention.layer_norm_rms_epsilon"
    found = _sizes(config) | {norm: getattr(config, eps.get(family.architecture, "rms_norm_eps"))}
    if family.architecture not in ("gemma2", "gemma4"):
        rope = config.rope_parameters
        found["rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
    if (head := family.settings.get("head_dim")) is not None:
        found |= {"attention.key_length": head, "attention.value_length": head}
    return found


def _positions(family: InGguf, config: Any) -> dict[str, Array]:
    rope = config.rope_parameters
    factors = {f"rope_factors_{name}.weight": rope.get(f"{name}_factor") for name in ("long", "short")}
    if family.architecture == "gemma4":
        turned = int(32 * rope["full_attention"]["partial_rotary_factor"])
        factors["rope_freqs.weight"] = [1.0] * turned + [1e30] * (32 - turned)
    if rope.get("rope_type") == "llama3":
        factors["rope_freqs.weight"] = llama3_divisors(rope["rope_theta"], 32, rope["factor"])
    return {name: np.array(numbers, np.float32) for name, numbers in factors.items() if numbers}


def _add_weights(writer: gguf.GGUFWriter, family: InGguf, model: Any) -> None:
    """Write each weight, and give the model what the file holds of it."""
    arch, config = family.architecture, model.config
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)

    def store(name: str, values: Array, kind: str) -> Array:
        kind = family.packed_as.get(name, kind)
        blocks, stored = _packed(name, values, kind)
        writer.add_tensor(name, blocks, raw_dtype=None if kind == "F32" else GGMLQuantizationType[kind])
        return stored

    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.numpy()
        if (stored := _stored_otherwise(arch, config, name, values, store)) is None:
            base, _, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
            theirs = names.get_name(base.replace("dt_bias", "dt_proj"))
            assert theirs, name
            suffix = "bias" if name.endswith("dt_bias") else suffix
            one = arch in _NORMS_BY_ONE and "norm." in name and suffix == "weight" and "linear_attn" not in name
            stored = store(f"{theirs}.{suffix}", values + one, _kind(name, values)) - one
        weight.copy_(torch.from_numpy(stored.copy()).view_as(weight).bfloat16())  # as it is loaded


def _kind(name: str, values: Array) -> str:
    """How llama.cpp's quantiser would keep a weight: what is not of whole blocks in a coarser or no packing."""
    if values.ndim < 2 or "norm" in name or "conv" in name:
        return "F32"
    if values.shape[-1] % 256:
        return "Q8_0" if values.shape[-1] % 32 == 0 else "F16"
    return next((kind for part, kind in _TIGHT.items() if part in name), "Q4_K")


def _packed(name: str, values: Array, kind: str) -> tuple[Array, Array]:
    """A tensor's blocks, and the numbers that they hold. Blocks of k-quants are any, of the values' size."""
    values = np.ascontiguousarray(values, np.float32)
    if kind == "F32":
        return values, values
    stored = GGMLQuantizationType[kind]
    if kind.lower() not in HALVES or kind == "Q8_0":
        blocks = gguf.quants.quantize(values, stored)
        return blocks, gguf.quants.dequantize(blocks, stored)
    size, width = GGML_QUANT_SIZES[stored]
    chance = np.random.default_rng(list(name.encode()))
    blocks = chance.integers(0, 256, (values.size // size, width), dtype=np.uint8)
    grown = 1.0
    for _ in range(2):  # once to see how large the numbers are, once as large as they should be
        for start in HALVES[kind.lower()]:
            halves = (np.linspace(-0.01, 0.01, len(blocks)) * grown).astype(np.float16)
            blocks[:, start : start + 2] = halves[:, None].view(np.uint8)
        numbers = gguf.quants.dequantize(blocks, stored)
        grown = values.std() / numbers.std()
    return blocks.reshape(*values.shape[:-1], -1), numbers.reshape(values.shape)


Store = Callable[[str, Array, str], Array]
_PARAMETERS = {
    "e_score_correction_bias": "exp_probs_b.bias",
    "router.scale": "ffn_gate_inp.scale",
    "per_expert_scale": "ffn_down_exps.scale",
}


def _stored_otherwise(arch: str, config: Any, name: str, values: Array, store: Store) -> Array | None:
    """What the converter does to some weights of some families; None: nothing to this one."""
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    kind = _kind(name, values)
    if "experts.gate_up_proj" in name and arch != "gemma4":
        return _gate_and_up(arch, name, values, layer, store)
    if "experts.down_proj" in name and arch == "gpt-oss":
        if name.endswith("bias"):
            return store(f"{layer}.ffn_down_exps.bias", values, "F32")
        return store(f"{layer}.ffn_down_exps.weight", values.swapaxes(1, 2), "MXFP4").swapaxes(1, 2)
    for ours, theirs in _PARAMETERS.items():
        if name.endswith(ours):
            return store(f"{layer}.{theirs}", values, "F32")
    if name.endswith("A_log"):
        order = _tiled(config, name, values)
        return np.log(-store(f"{layer}.ssm_a", -np.exp(values[order]), "F32"))[np.argsort(order)]
    if name.endswith("conv.conv.weight"):
        return store(f"{layer}.shortconv.conv.weight", values[:, 0], "F32")
    if "linear_attn" in name and (order := _tiled(config, name, values)) is not None:
        return _reordered(name, values, order, layer, kind, store)
    if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = 4 if "q_proj" in name else 2
        turned = interleaved(np.arange(len(values))[:, None], heads)[:, 0]
        part = "attn_q" if "q_proj" in name else "attn_k"
        return store(f"{layer}.{part}.weight", values[turned], kind)[np.argsort(turned)]
    if arch == "qwen2moe" and name.endswith("shared_expert_gate.weight"):
        return store(f"{layer}.ffn_gate_inp_shexp.weight", values[0], "F32")
    return None


def _gate_and_up(arch: str, name: str, values: Array, layer: str, store: Store) -> Array:
    kind = "bias" if name.endswith("bias") else "weight"
    if arch == "gpt-oss":
        values = values.swapaxes(1, 2) if kind == "weight" else values
        packing = "MXFP4" if kind == "weight" else "F32"
        gate = store(f"{layer}.ffn_gate_exps.{kind}", values[:, ::2], packing)
        up = store(f"{layer}.ffn_up_exps.{kind}", values[:, 1::2], packing)
        both = np.stack([gate, up], axis=2).reshape(values.shape)
        return both.swapaxes(1, 2) if kind == "weight" else both
    gate, up = np.split(values, 2, axis=1)
    parts = [store(f"{layer}.ffn_{part}_exps.weight", half, "Q4_K") for part, half in (("gate", gate), ("up", up))]
    return np.concatenate(parts, axis=1)


_IN_DELTA = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "dt_bias": "ssm_dt.bias",
    "out_proj.weight": "ssm_out.weight",
}


def _reordered(name: str, values: Array, order: Array, layer: str, kind: str, store: Store) -> Array:
    theirs = f"{layer}.{next(own for part, own in _IN_DELTA.items() if name.endswith(part))}"
    back = np.argsort(order)
    if "out_proj" in name:
        return store(theirs, values[:, order], kind)[:, back]
    return store(theirs, (values[:, 0] if "conv1d" in name else values)[order], kind)[back]


def _tiled(config: Any, name: str, values: Array) -> Array | None:
    """In which order llama.cpp keeps the rows (or columns) of value heads of Gated DeltaNet; None: of none."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    if name.endswith("linear_attn.norm.weight"):
        return None
    count = values.shape[1] if "out_proj" in name else values.shape[0]
    first = 2 * config.linear_key_head_dim * keys if "qkv" in name or "conv1d" in name else 0
    own = np.arange(first, count).reshape(keys, heads // keys, -1).swapaxes(0, 1).ravel()
    return np.concatenate([np.arange(first), own])
