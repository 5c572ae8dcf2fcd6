"""Numbers of a tensor in a GGUF file."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from kvtool.core.checkpoint.gguf.header import TensorInfo
from kvtool.core.errors import ModelError
from kvtool.core.kernels.linear.qtensor import READERS, QuantizedTensor, tensor_of_blocks
from kvtool.core.kernels.linear.quantized import unpacked

Numbers = np.ndarray[Any, Any]


def kind_of(tensor: TensorInfo) -> str:
    return GGMLQuantizationType(tensor.kind).name.lower()


def _bytes(gguf: Path, tensor: TensorInfo) -> Numbers:
    return np.fromfile(gguf, np.uint8, tensor.nbytes, offset=tensor.start)


def quantized(gguf: Path, tensor: TensorInfo) -> QuantizedTensor:
    columns, *rows = tensor.shape
    try:
        return tensor_of_blocks(kind_of(tensor), torch.from_numpy(_bytes(gguf, tensor)), prod(rows), columns)
    except ValueError as error:
        raise ModelError(f"{gguf}: the tensor {tensor.name!r} is damaged: {error}", "download it again") from error


def numbers_of(gguf: Path, tensor: TensorInfo) -> Numbers:
    """Unpack a tensor: float32, slowest axis first. Experts, whose numbers are only moved, are rounded to bfloat16."""
    if kind_of(tensor) in READERS and len(tensor.shape) > 2:
        return unpacked(quantized(gguf, tensor), torch.float32).numpy().reshape(tensor.shape[::-1])
    return dequantize(_bytes(gguf, tensor), GGMLQuantizationType(tensor.kind)).reshape(tensor.shape[::-1])
