"""Quantised weights of a GGUF file, stored next to its converted folder and used as they are on disk.

The tensor of the GGUF file that is a weight, and the order of its rows, are found by comparing numbers: llama.cpp's
names and its order of rotary rows differ from those of `transformers` by family. A tensor that was found is unpacked
and compared bit for bit, so packed weights are never another model than the folder's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvtool.core.checkpoint.files import PACKED, tensor_table, weight_files
from kvtool.core.checkpoint.gguf.header import GgufHeader, TensorInfo
from kvtool.core.checkpoint.text_submodel import TextSubmodel
from kvtool.core.errors import ModelError
from kvtool.core.kernels.linear.modules import PackedEmbedding, PackedLinear
from kvtool.core.kernels.linear.qtensor import (
    LAYOUTS,
    READERS,
    QuantizedTensor,
    dense,
    take_rows,
    tensor_of_blocks,
)
from kvtool.core.kernels.linear.quantized import dequantize_rows

_PARTS = {"data": "data", "scales": "scales", "mins": "group_mins"}  # names in a file, and of attributes
_ROWS = 4096  # unpacked at a time


def pack_folder(folder: Path, gguf: Path, header: GgufHeader) -> None:
    tensors: dict[str, torch.Tensor] = {}
    kinds: dict[str, str] = {}
    sought = _weights_by_rows(folder)
    for info in header.tensors.values():
        if (found := _matrix(gguf, info)) is not None:
            for name, matrix in _matched(found, sought):
                kinds[name] = matrix.kind
                for part, own in _PARTS.items():
                    tensors[f"{name}.{part}"] = getattr(matrix, own).clone()  # two may be alike
    unfinished = folder / f"{PACKED}.part"
    save_file(tensors, unfinished, {"kinds": json.dumps(kinds)})
    unfinished.replace(folder / PACKED)


def read_packed(folder: Path) -> dict[str, QuantizedTensor]:
    path = folder / PACKED
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as file:
            kinds = json.loads((file.metadata() or {})["kinds"])
            found = {}
            for name, kind in kinds.items():
                data, scales, mins = (file.get_tensor(f"{name}.{part}") for part in _PARTS)
                columns = data.shape[1] * 8 // LAYOUTS[kind].bits
                found[name] = QuantizedTensor(kind, data.shape[0], columns, data, scales, mins)
            return found
    except Exception as error:
        raise ModelError(f"{path} is damaged: {error}", "delete it; it is made again from the GGUF file") from error


def _matrix(gguf: Path, info: TensorInfo) -> QuantizedTensor | None:
    """Read a tensor of a GGUF file; None where its kind stays unpacked."""
    from gguf.constants import GGMLQuantizationType

    kind = GGMLQuantizationType(info.kind).name.lower()
    if kind not in READERS or len(info.shape) != 2:
        return None
    columns, rows = info.shape
    data = np.fromfile(gguf, np.uint8, info.nbytes, offset=info.start)
    try:
        return tensor_of_blocks(kind, torch.from_numpy(data), rows, columns)
    except ValueError as error:
        raise ModelError(f"{gguf}: the tensor {info.name!r} is damaged: {error}", "download it again") from error


_Sought = dict[tuple[tuple[int, ...], int], list[tuple[Path, str, torch.Tensor]]]


def _weights_by_rows(folder: Path) -> _Sought:
    """Return the folder's matrices by shape and the sum of their rows' hashes, which no order of rows changes."""
    sought: _Sought = {}
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                if len(file.get_slice(name).get_shape()) == 2:
                    hashes = torch.cat([_row_hashes(rows) for rows in file.get_tensor(name).split(_ROWS)])
                    key = tuple(file.get_slice(name).get_shape()), int(hashes.sum())
                    sought.setdefault(key, []).append((path, name, hashes))
    return sought


def _matched(matrix: QuantizedTensor, sought: _Sought) -> Iterator[tuple[str, QuantizedTensor]]:
    hashes = torch.cat([_row_hashes(rows) for rows in _unpacked(matrix)])
    for path, name, wanted in sought.get(((matrix.rows, matrix.columns), int(hashes.sum())), []):
        order = torch.empty_like(hashes)
        order[wanted.argsort(stable=True)] = hashes.argsort(stable=True)
        own = matrix if torch.equal(order, torch.arange(len(order))) else take_rows(matrix, order)
        with safe_open(path, "pt") as file:
            rows = file.get_tensor(name).split(_ROWS)
        if all(torch.equal(given, kept) for given, kept in zip(_unpacked(own), rows, strict=True)):
            yield name, own


def _unpacked(matrix: QuantizedTensor) -> Iterator[torch.Tensor]:
    out = torch.empty(_ROWS * matrix.columns, dtype=torch.bfloat16)
    for first in range(0, matrix.rows, _ROWS):
        last = min(first + _ROWS, matrix.rows)
        yield dequantize_rows(matrix, first, last, out)


def _row_hashes(rows: torch.Tensor) -> torch.Tensor:
    bits = (rows.bfloat16() + 0.0).contiguous()  # a zero has a sign, which nothing depends on
    words = bits.view(torch.int64 if rows.shape[1] % 4 == 0 else torch.int16)
    chance = torch.Generator().manual_seed(rows.shape[1])
    factors = torch.randint(-(2**62), 2**62, (words.shape[1],), generator=chance) | 1
    return (words.long() * factors).sum(1)


def packed_model(folder: Path, text: TextSubmodel, dtype: str, int8: bool = False) -> Any:
    """Build a model whose weights stay on disk, mapped; None: impossible. `int8`: as of `PackedLinear`."""
    matrices = (_bfloat16(folder, text) if dtype == "float32" else {}) | read_packed(folder)
    if not matrices:
        return None
    model = _empty(folder, text, getattr(torch, dtype))
    plain = dict(model.named_modules())
    shared = {name: matrices[own] for name, own in (model.all_tied_weights_keys or {}).items() if own in matrices}
    for name, matrix in (matrices | shared).items():
        path = name.removesuffix(".weight")
        _replace(model, path, plain.get(path), matrix, int8)
    return model.eval().requires_grad_(False) if _fill(model, folder, text) else None


def _bfloat16(folder: Path, text: TextSubmodel) -> dict[str, QuantizedTensor]:
    found = {}
    for path in weight_files(folder):
        table = tensor_table(path)
        with safe_open(path, "pt") as file:
            for name, entry in table.items():
                if entry["dtype"] == "BF16" and len(entry["shape"]) == 2 and (own := text.own(name)) is not None:
                    found[own] = dense(file.get_tensor(name))
    return found


def _empty(folder: Path, text: TextSubmodel, dtype: torch.dtype) -> Any:
    """Build the model with weights that hold nothing: no page of them is touched before they are freed."""
    from transformers.generation.configuration_utils import GenerationConfig
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = text.empty(dtype)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return model


def _replace(model: Any, path: str, plain: Any, matrix: QuantizedTensor, int8: bool) -> None:
    """Put a packed layer in the place of a plain one; any other layer keeps what `_fill` reads for it.

    A family that is saved under other names than it is built with has no such layer.
    """
    if plain is None or tuple(plain.weight.shape) != (matrix.rows, matrix.columns):
        return
    if type(plain) is torch.nn.Linear:
        bias = None if plain.bias is None else plain.bias.detach()
        model.set_submodule(path, PackedLinear(matrix, bias, plain.weight.dtype, int8))
    elif type(plain) is torch.nn.Embedding:
        model.set_submodule(path, PackedEmbedding(matrix, plain.padding_idx, plain.weight.dtype))


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
