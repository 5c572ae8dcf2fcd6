"""GGUF files for tests: the tiny llama of `families`, changed as a test wants it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.families import tiny_model, tiny_tokenizer

LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


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
    model, tokenizer = tiny_model("llama", "bfloat16"), tiny_tokenizer()
    config, weights = model.config, {k: v.float().numpy() for k, v in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    writer.add_block_count(metadata.pop("block_count", config.num_hidden_layers))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(metadata.pop("embedding_length", config.hidden_size))
    writer.add_feed_forward_length(metadata.pop("feed_forward_length", config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, tokenizer)
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key.replace("__", "."), value)
    for name, tensor in {**tiny_tensors(weights), **(tensors or {})}.items():
        if name != drop:
            add_tensor(writer, name, np.ascontiguousarray(tensor, dtype=np.float32), kinds or {})
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


def tiny_tensors(weights: dict[str, Any]) -> dict[str, Any]:
    tensors = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    for i in range(4):
        for theirs, ours in LAYER.items():
            weight = weights[f"model.layers.{i}.{ours}.weight"]
            heads = {"attn_q": 4, "attn_k": 2}.get(theirs)
            tensors[f"blk.{i}.{theirs}.weight"] = interleaved(weight, heads) if heads else weight
    return tensors
