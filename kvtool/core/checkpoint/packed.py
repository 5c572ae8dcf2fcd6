"""Models whose linear layers multiply weights as a checkpoint has them: the blocks of a GGUF file, or bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kvtool.core.checkpoint.files import tensor_table, weight_files
from kvtool.core.checkpoint.support import TextSubmodel
from kvtool.core.kernels.linear.modules import PackedEmbedding, PackedLinear
from kvtool.core.kernels.linear.qtensor import QuantizedTensor, dense
from kvtool.core.kernels.linear.quantized import unpacked

_LAYERS = (torch.nn.Linear, torch.nn.Embedding)  # that have a packed form


def gguf_model(gguf: Path, folder: Path, text: TextSubmodel, dtype: str, packed: bool, int8: bool = False) -> Any:
    """Build the model of a GGUF file, of the settings in `folder`; parameters are rounded to bfloat16.

    With `packed` matrices stay as they are in the file, and others bfloat16 under float32 arithmetic. `int8`: as of
    `PackedLinear`.
    """
    from kvtool.core.checkpoint.gguf.header import read_header
    from kvtool.core.checkpoint.gguf.weights import read_weights

    model = empty_model(folder, text, getattr(torch, dtype))
    layers = {f"{path}.weight" for path, layer in model.named_modules() if packed and type(layer) in _LAYERS}
    tied = model.all_tied_weights_keys or {}
    shared = {source for name, source in tied.items() if name in layers}
    matrices, rest = {}, {}
    for name, weight in read_weights(gguf, read_header(gguf), model, layers | shared):
        if isinstance(weight, QuantizedTensor):
            matrices[name] = weight
        elif name in layers | shared and dtype == "float32":
            matrices[name] = dense(weight)
        if name not in layers or name not in matrices:
            rest[name] = unpacked(weight, torch.bfloat16) if isinstance(weight, QuantizedTensor) else weight
    _replace(model, matrices, int8)
    state = model.state_dict(keep_vars=True)
    while rest:  # each is freed when its copy is made
        name, weight = rest.popitem()
        state[name].data = weight.to(state[name].dtype)
    if not matrices.keys() & set(tied.values()):
        model.tie_weights()
    return model.eval().requires_grad_(False)


def bfloat16_model(folder: Path, text: TextSubmodel) -> Any:
    """Build a float32 model whose bfloat16 matrices stay on disk, mapped; None: impossible."""
    matrices = {}
    for path in weight_files(folder):
        table = tensor_table(path)
        with safe_open(path, "pt") as file:
            for name, entry in table.items():
                if entry["dtype"] == "BF16" and len(entry["shape"]) == 2 and (own := text.own(name)) is not None:
                    matrices[own] = dense(file.get_tensor(name))
    if not matrices:
        return None
    model = empty_model(folder, text, torch.float32)
    _replace(model, matrices)
    return model.eval().requires_grad_(False) if _fill(model, folder, text) else None


def empty_model(folder: Path, text: TextSubmodel, dtype: torch.dtype) -> Any:
    """Build the model with weights that hold nothing: no page of them is touched before they are freed."""
    from transformers.generation.configuration_utils import GenerationConfig
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = text.empty(dtype)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return model


def _replace(model: Any, matrices: Mapping[str, QuantizedTensor], int8: bool = False) -> None:
    """Put packed layers in the place of plain ones; any other layer keeps its parameters.

    A family that is saved under other names than it is built with has no such layers.
    """
    layers, sources = dict(model.named_modules()), model.all_tied_weights_keys or {}
    tied = {name: matrices[source] for name, source in sources.items() if source in matrices}
    for name, matrix in (dict(matrices) | tied).items():
        path = name.removesuffix(".weight")
        layer: Any = layers.get(path)
        if type(layer) not in _LAYERS or tuple(layer.weight.shape) != (matrix.rows, matrix.columns):
            continue
        if isinstance(layer, torch.nn.Linear):
            bias = None if layer.bias is None else layer.bias.detach()
            model.set_submodule(path, PackedLinear(matrix, bias, layer.weight.dtype, int8))
        else:
            model.set_submodule(path, PackedEmbedding(matrix, layer.padding_idx, layer.weight.dtype))


def _fill(model: Any, folder: Path, text: TextSubmodel) -> bool:
    """Read the weights that are not packed into the model; return True if the folder has all of them."""
    packed = {f"{name}.weight" for name, module in model.named_modules() if hasattr(module, "matrix")}
    left = {name: value for name, value in model.state_dict(keep_vars=True).items() if name not in packed}
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                if (own := text.own(name)) not in left:
                    continue
                value, kept = left.pop(own), file.get_tensor(name)
                if value.shape != kept.shape:
                    return False
                value.data = kept.to(value.dtype)
    return not left
