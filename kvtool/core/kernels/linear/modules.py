"""Linear layers that are only run forward, and layers of a model whose weights stay packed."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
import torch.nn.functional as F

from kvtool.core.kernels.linear.qtensor import QuantizedTensor, take_rows
from kvtool.core.kernels.linear.quantized import (
    dequantize_rows,
    gemv,
    has_int8,
    has_int8_row,
    int8_gemm,
    least_rows,
    small_batch_gemm,
)

_TILE_BYTES = 32 * 2**20  # of unpacked weights at a time: more than any layer of a small model, less than an LM head
# Rows beyond which oneDNN's products of unpacked bfloat16 weights are as fast as ours. Of float32 ours always are: one
# core of an AMD EPYC 100 GFLOP/s with AVX2, as MKL's without the unpacking, and 170 to 200 with AVX-512, twice MKL's.
_MOST_FEW = {torch.bfloat16: 256}
_scratch = threading.local()


class PackedLinear(torch.nn.Linear):
    """A linear layer whose weight is a packed matrix, which is only run forward.

    One row, as decoding has it, is multiplied with the packed weights as they are in the file. For more rows they are
    unpacked into memory that all layers share, rounded to bfloat16, and multiplied by torch;
    for a prompt's rows over its cache some at a time, and multiplied where they are (`rows_product`). With `int8` rows
    are rounded to 8-bit integers (`int8_gemm`, `gemv`), where the CPU and the kind of weights allow it.

    Measured, SmolLM2's 106 million weights of its layers in Q4_1, one core, AVX2 float32: 6 ms a row packed; 12 ms to
    unpack, which with 4 to 160 rows is no slower than reading 425 MB of float32 weights.
    """

    def __init__(
        self, matrix: QuantizedTensor, bias: torch.Tensor | None, dtype: torch.dtype, int8: bool = False
    ) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = matrix.columns, matrix.rows
        self.matrix = matrix
        shape = torch.empty(matrix.rows, matrix.columns, dtype=dtype, device="meta")
        self.weight = torch.nn.Parameter(shape, requires_grad=False)
        self._least_few, self.int8 = least_rows(matrix, dtype), int8 and has_int8(matrix)
        self.int8_row = int8 and has_int8_row(matrix)
        parameter = None if bias is None else torch.nn.Parameter(bias.to(dtype), requires_grad=False)
        self.register_parameter("bias", parameter)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.numel() == self.in_features:
            return self._one(input)
        if self.int8:
            return self._few(input.reshape(-1, self.in_features).contiguous()).view(*input.shape[:-1], -1)
        return self.unpacked_product(input)

    def _one(self, x: torch.Tensor) -> torch.Tensor:
        y = gemv(self.matrix, x.reshape(-1).float().contiguous(), int8=self.int8_row)
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    def rows_product(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows of a prompt, contiguous or not, in the way that is fast for so many; sums may come in another
        order than `forward` has."""
        count = rows.numel() // self.in_features
        if not self.in_team(count, rows.dtype):
            return self(rows)  # type: ignore[no-any-return]
        products = self._few(rows.reshape(count, self.in_features).contiguous())
        return products.view(*rows.shape[:-1], self.out_features)

    def in_team(self, rows: int, dtype: torch.dtype) -> bool:
        """Return True if `rows_product` multiplies so many rows by machine code, and by none of torch's threads."""
        if self.int8:
            return rows > 1  # a single one is that of decoding
        return self._least_few is not None and self._least_few <= rows <= _MOST_FEW.get(dtype, rows)

    def _few(self, rows: torch.Tensor) -> torch.Tensor:
        return (int8_gemm if self.int8 else small_batch_gemm)(self.matrix, rows, self.bias)

    def unpacked_product(self, rows: torch.Tensor) -> torch.Tensor:
        step = max(1, _TILE_BYTES // (self.in_features * rows.itemsize))
        if step >= self.out_features:
            return F.linear(rows, self._unpacked(0, self.out_features, rows.dtype), self.bias)
        out = rows.new_empty((*rows.shape[:-1], self.out_features))
        for first in range(0, self.out_features, step):
            last = min(first + step, self.out_features)
            bias = None if self.bias is None else self.bias[first:last]
            out[..., first:last] = F.linear(rows, self._unpacked(first, last, rows.dtype), bias)
        return out

    def _unpacked(self, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        size = (last - first) * self.in_features
        numbers: torch.Tensor | None = getattr(_scratch, "numbers", None)
        if numbers is None or numbers.numel() < size or numbers.dtype != dtype:
            with torch.inference_mode(False):  # it may be written to outside that mode, too
                numbers = _scratch.numbers = torch.empty(size, dtype=dtype)
        return dequantize_rows(self.matrix, first, last, numbers)


class PackedEmbedding(torch.nn.Embedding):
    """An embedding whose rows are packed: those asked for are unpacked, rounded to bfloat16. `weight` has the right
    shape and dtype, and one number that stands for all, on the CPU."""

    def __init__(self, matrix: QuantizedTensor, padding_idx: int | None, dtype: torch.dtype) -> None:
        torch.nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = matrix.rows, matrix.columns
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        self.matrix = matrix
        shape = torch.zeros((), dtype=dtype).expand(matrix.rows, matrix.columns)
        self.weight = torch.nn.Parameter(shape, requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = take_rows(self.matrix, input.reshape(-1))
        out = torch.empty(rows.rows, rows.columns, dtype=self.weight.dtype)
        return dequantize_rows(rows, 0, rows.rows, out).view(*input.shape, -1)


_ROWS = 160  # a hint for the layout; measured: it serves 1 to 2,048 rows alike
# What oneDNN and torch's layer above it ask for the number of kernels to keep, at the first product.
KERNELS_KEPT = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_KEPT = "128"


def can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_weights(model: torch.nn.Module) -> int:
    """Pack every linear layer of a model that is only run forward; returns how many.

    The results stay the same bit for bit. A packed layer keeps no plain weight: gradients cannot pass through it. The
    weight of an LM head tied to the embedding is kept for that. Measured, Qwen2.5-0.5B on 2 cores: a product takes .40
    of its time with 1 row, .62 with 32, .87 with 160 and .91 with 2,048; packing takes 0.6 s.
    """
    modules = list(model.modules())
    linears = [module for module in modules if type(module) is torch.nn.Linear and can_pack(module.weight)]
    tied = {id(module.weight) for module in modules if isinstance(module, torch.nn.Embedding)}
    with torch.inference_mode():
        for linear in linears:
            _pack(linear, keep=id(linear.weight) in tied)
    return len(linears)


def _pack(linear: torch.nn.Linear, keep: bool) -> None:
    packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, _ROWS)
    changed: Any = linear
    changed.__class__ = ReorderedLinear
    changed.reordered = packed
    if not keep:  # its shape stays known
        changed.weight = torch.nn.Parameter(linear.weight.to("meta"), requires_grad=False)


class ReorderedLinear(torch.nn.Linear):
    """A linear layer whose weight oneDNN has laid out, which is only run forward."""

    reordered: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self.reordered, self.bias, "none", [], "")
        return out


def keep_few_kernels() -> None:
    """Bound what a process that meets many prompt lengths keeps of code for products; before its first product.

    For every number of rows oneDNN makes a kernel a weight's shape, 0.3 to 0.7 MB in 0.5 ms, and would keep 1,024, as
    would torch once more. A prompt takes 9. Variables that are already set are not changed.
    """
    for name in KERNELS_KEPT:
        os.environ.setdefault(name, _KEPT)
