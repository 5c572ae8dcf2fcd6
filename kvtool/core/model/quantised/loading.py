"""A model made of weights as they are on disk: packed as in a GGUF file, or bfloat16 where it computes in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kvtool.core.kernels.linear.modules import PackedEmbedding, PackedLinear
from kvtool.core.kernels.linear.qtensor import QuantizedTensor, dense
from kvtool.core.model.attention import plain_attention
from kvtool.core.model.files import tensor_table, weight_files
from kvtool.core.model.quantised.folder import read_packed
from kvtool.core.model.text import Part
from kvtool.core.native.isa import best_isa


def packed_model(folder: Path, part: Part, dtype: str) -> Any:
    """Build a model whose weights stay as they are on disk; None: it has to be loaded as others are.

    They are mapped into memory, not copied into it. Of a checkpoint in bfloat16 a model that computes in float32 keeps
    half the bytes so.

    Parameters
    ----------
    part : what of the folder is loaded, its family supported.
    dtype : what it computes in: "float32" or "bfloat16".

    Raises
    ------
    ModelError : the packed weights are damaged.
    """
    matrices = read_packed(folder) if best_isa() is not None else {}
    if best_isa() is not None and dtype == "float32":
        matrices = _bfloat16(folder, part) | matrices
    if not matrices:
        return None
    model = _empty(folder, part, getattr(torch, dtype))
    plain = dict(model.named_modules())
    for name, matrix in _with_tied(model, matrices).items():
        path = name.removesuffix(".weight")
        _replace(model, path, plain.get(path), matrix)
    return model.eval().requires_grad_(False) if _fill(model, folder, part) else None


def _bfloat16(folder: Path, part: Part) -> dict[str, QuantizedTensor]:
    """The bfloat16 matrices of a checkpoint, mapped from its files."""
    found = {}
    for path in weight_files(folder):
        table = tensor_table(path)
        with safe_open(path, "pt") as file:
            for name, entry in table.items():
                if entry["dtype"] == "BF16" and len(entry["shape"]) == 2 and (own := part.own(name)) is not None:
                    found[own] = dense(file.get_tensor(name))
    return found


def _empty(folder: Path, part: Part, dtype: torch.dtype) -> Any:
    """The model with weights that hold nothing: no page of them is touched before they are let go."""
    from transformers.generation.configuration_utils import GenerationConfig
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = part.empty(dtype)
    model.set_attn_implementation(plain_attention(model))
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return model


def _with_tied(model: Any, matrices: Mapping[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:
    """The matrices, and once more those of layers that share another's weight."""
    tied = model.all_tied_weights_keys or {}
    shared = {name: matrices[source] for name, source in tied.items() if source in matrices}
    return {**matrices, **shared}


def _replace(model: Any, path: str, plain: Any, matrix: QuantizedTensor) -> None:
    """Put a packed layer in a plain one's place; any other keeps what `_fill` reads for it.

    There may be none: some families are saved under other names than they are built with.
    """
    if plain is None or tuple(plain.weight.shape) != (matrix.rows, matrix.columns):
        return
    if type(plain) is torch.nn.Linear:
        bias = None if plain.bias is None else plain.bias.detach()
        model.set_submodule(path, PackedLinear(matrix, bias, plain.weight.dtype))
    elif type(plain) is torch.nn.Embedding:
        model.set_submodule(path, PackedEmbedding(matrix, plain.padding_idx, plain.weight.dtype))


def _fill(model: Any, folder: Path, part: Part) -> bool:
    """Read what is not packed into the model; whether the folder has all of it."""
    packed = {f"{name}.weight" for name, module in model.named_modules() if hasattr(module, "matrix")}
    left = {name: value for name, value in model.state_dict(keep_vars=True).items() if name not in packed}
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                if (own := part.own(name)) not in left:
                    continue
                value, kept = left.pop(own), file.get_tensor(name)
                if value.shape != kept.shape:
                    return False
                value.data = kept.to(value.dtype)
    return not left
