"""Packed weights beside those of a converted GGUF file: found once, then read where they lie.

Which tensor of the GGUF file is which weight, and in what order its rows stand, is read off the numbers themselves:
llama.cpp's names and its order of rotary rows differ from those of `transformers` by family. What is found is unpacked
and compared, bit for bit, so that packed weights are never another model than the folder's.
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

from kvtool.core.errors import ModelError
from kvtool.core.kernels.linear.qtensor import READERS, QuantizedTensor, dequantize, take_rows, tensor_of_blocks
from kvtool.core.kernels.linear.quantized import dequantize_rows
from kvtool.core.model.files import PACKED, weight_files
from kvtool.core.model.gguf_header import GgufHeader, TensorInfo
from kvtool.core.native.isa import best_isa

_PARTS = {"data": "data", "scales": "scales", "mins": "group_mins"}  # names in a file, and of attributes
_ROWS = 4096  # unpacked at a time


def pack_folder(folder: Path, gguf: Path, header: GgufHeader) -> None:
    """Write the packed weights of a converted folder.

    Raises
    ------
    ModelError : the GGUF file holds scales that are no numbers.
    """
    tensors: dict[str, torch.Tensor] = {}
    kinds: dict[str, str] = {}
    sought = _weights_by_rows(folder)
    for info in header.tensors.values():
        if (found := _matrix(gguf, info)) is not None:
            for name, matrix in _matched(found, sought):
                kinds[name] = matrix.kind
                for kept, own in _PARTS.items():
                    tensors[f"{name}.{kept}"] = getattr(matrix, own).clone()  # two may be alike
    part = folder / f"{PACKED}.part"
    save_file(tensors, part, {"kinds": json.dumps(kinds)})
    part.replace(folder / PACKED)


def read_packed(folder: Path) -> dict[str, QuantizedTensor]:
    """The packed weights of a converted folder by the model's names for them, mapped from the file; {}: it has none.

    Raises
    ------
    ModelError : the file is damaged.
    """
    path = folder / PACKED
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as file:
            kinds = json.loads((file.metadata() or {})["kinds"])
            return {name: _read(file, name, kind) for name, kind in kinds.items()}
    except Exception as error:
        raise ModelError(f"{path} is damaged: {error}", "delete it; it is made again from the GGUF file") from error


def _read(file: Any, name: str, kind: str) -> QuantizedTensor:
    data, scales, mins = (file.get_tensor(f"{name}.{part}") for part in _PARTS)
    columns = data.shape[1] * 8 // READERS[kind][1]
    return QuantizedTensor(kind, data.shape[0], columns, data, scales, mins)


def _matrix(gguf: Path, info: TensorInfo) -> QuantizedTensor | None:
    """A tensor of a GGUF file; None where its kind stays unpacked."""
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
    """The folder's matrices by shape and the sum of their rows' marks, which no order of rows changes."""
    sought: _Sought = {}
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                if len(file.get_slice(name).get_shape()) == 2:
                    marks = torch.cat([_marks(rows) for rows in file.get_tensor(name).split(_ROWS)])
                    key = tuple(file.get_slice(name).get_shape()), int(marks.sum())
                    sought.setdefault(key, []).append((path, name, marks))
    return sought


def _matched(matrix: QuantizedTensor, sought: _Sought) -> Iterator[tuple[str, QuantizedTensor]]:
    """The weights that a matrix is, each with its rows in the weight's own order."""
    marks = torch.cat([_marks(rows) for rows in _unpacked(matrix)])
    for path, name, wanted in sought.get(((matrix.rows, matrix.columns), int(marks.sum())), []):
        order = torch.empty_like(marks)
        order[wanted.argsort(stable=True)] = marks.argsort(stable=True)
        own = matrix if torch.equal(order, torch.arange(len(order))) else take_rows(matrix, order)
        with safe_open(path, "pt") as file:
            rows = file.get_tensor(name).split(_ROWS)
        if all(torch.equal(given, kept) for given, kept in zip(_unpacked(own), rows, strict=True)):
            yield name, own


def _unpacked(matrix: QuantizedTensor) -> Iterator[torch.Tensor]:
    """Its numbers as a converted folder has them, some rows at a time."""
    out = torch.empty(_ROWS * matrix.columns, dtype=torch.bfloat16)
    for first in range(0, matrix.rows, _ROWS):
        last = min(first + _ROWS, matrix.rows)
        if best_isa() is None:
            yield dequantize(take_rows(matrix, torch.arange(first, last))).bfloat16()
        else:
            yield dequantize_rows(matrix, first, last, out)


def _marks(rows: torch.Tensor) -> torch.Tensor:
    """A number for each row `[rows]` that differs where the rows do, nearly always."""
    bits = (rows.bfloat16() + 0.0).contiguous()  # a zero has a sign, which nothing depends on
    words = bits.view(torch.int64 if rows.shape[1] % 4 == 0 else torch.int16)
    chance = torch.Generator().manual_seed(rows.shape[1])
    factors = torch.randint(-(2**62), 2**62, (words.shape[1],), generator=chance) | 1
    return (words.long() * factors).sum(1)
