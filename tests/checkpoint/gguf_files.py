"""GGUF files for tests: the tiny llama of `families`, changed as a test wants it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.families import tiny_model, tiny_tokenizer


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
    own = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": 16,
        "rope.freq_base": 10_000.0,
        "vocab_size": config.vocab_size,
    }
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
