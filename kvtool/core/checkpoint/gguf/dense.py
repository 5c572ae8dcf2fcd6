"""Weights of a dense decoder in a GGUF file, under the names of `checkpoint/dense.py`.

llama.cpp's converter renames tensors; of Llama's it also reorders the rows of queries and keys, so that the numbers of
a head that rotate together are neighbours, and it adds one to the norms of Gemma's.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from kvtool.core.checkpoint.architecture import Architecture, UnlistedArchitecture
from kvtool.core.checkpoint.gguf.folder import POSITIONS
from kvtool.core.checkpoint.gguf.header import TensorInfo, read_header
from kvtool.core.errors import ModelError
from kvtool.core.kernels.linear.qtensor import READERS, QuantizedTensor, read_blocks, take_rows
from kvtool.core.kernels.linear.quantized import unpacked

Numbers = np.ndarray[Any, Any]
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v", "qkv")},
    **{"attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
}
_GEMMA = {
    **{"ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm"},
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAMES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), _PARTS),
    "phi3": _PARTS | {"ffn_up": "mlp.gate_up_proj"},
    **dict.fromkeys(("gemma2", "gemma3"), _PARTS | _GEMMA),
}


def read_dense(gguf: Path, architecture: Architecture) -> Iterator[tuple[str, torch.Tensor | QuantizedTensor]]:
    """Read every weight: a matrix as in the file where its kind is multiplied so, else bfloat16. Raises
    UnlistedArchitecture, and ModelError: the file is damaged."""
    header = read_header(gguf)
    if (parts := _NAMES.get(header.architecture)) is None:
        raise UnlistedArchitecture(f"the architecture {header.architecture} is not listed")
    heads = {"attn_q": architecture.heads, "attn_k": architecture.kv_heads} if header.architecture == "llama" else {}

    def read(tensor: TensorInfo) -> torch.Tensor | QuantizedTensor:
        order = _order(tensor, heads.get(tensor.name.split(".")[-2], 0))
        if len(tensor.shape) == 2 and kind_of(tensor) in READERS:
            matrix = quantized(gguf, tensor)
            return matrix if order is None else take_rows(matrix, order)
        numbers = torch.from_numpy(numbers_of(gguf, tensor))
        if architecture.family.adds_one and tensor.name.endswith("norm.weight"):
            numbers = numbers - 1
        return (numbers if order is None else numbers[order]).bfloat16()

    tensors = [tensor for name, tensor in header.tensors.items() if name not in POSITIONS]
    names = [_name(tensor.name, parts) for tensor in tensors]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        yield from zip(names, threads.map(read, tensors), strict=True)


def _name(tensor: str, parts: dict[str, str]) -> str:
    match tensor.split("."):
        case ["blk", layer, part, kind] if part in parts:
            return f"model.layers.{layer}.{parts[part]}.{kind}"
        case [part, kind] if part in _ENDS:
            return f"{_ENDS[part]}.{kind}"
    raise UnlistedArchitecture(f"there is a tensor {tensor}")


def _order(tensor: TensorInfo, heads: int) -> torch.Tensor | None:
    """Return where the rows of a head's first halves, then those of its second halves, are; None: as they are."""
    if not heads:
        return None
    return torch.arange(tensor.shape[-1]).view(heads, -1, 2).transpose(1, 2).flatten()


# ---- numbers of a tensor ---------------------------------------------------------------------------------------


def kind_of(tensor: TensorInfo) -> str:
    return GGMLQuantizationType(tensor.kind).name.lower()


def _bytes(gguf: Path, tensor: TensorInfo) -> Numbers:
    return np.fromfile(gguf, np.uint8, tensor.nbytes, offset=tensor.start)


def quantized(gguf: Path, tensor: TensorInfo) -> QuantizedTensor:
    columns, *rows = tensor.shape
    try:
        with gguf.open("rb", buffering=0) as file:
            file.seek(tensor.start)
            return read_blocks(kind_of(tensor), file, tensor.nbytes, prod(rows), columns)
    except ValueError as error:
        raise ModelError(f"{gguf}: the tensor {tensor.name!r} is damaged: {error}", "download it again") from error


def numbers_of(gguf: Path, tensor: TensorInfo) -> Numbers:
    """Unpack a tensor: float32, slowest axis first. Experts, whose numbers are only moved, are rounded to bfloat16."""
    if kind_of(tensor) in READERS and len(tensor.shape) > 2:
        return unpacked(quantized(gguf, tensor), torch.float32).numpy().reshape(tensor.shape[::-1])
    return dequantize(_bytes(gguf, tensor), GGMLQuantizationType(tensor.kind)).reshape(tensor.shape[::-1])
