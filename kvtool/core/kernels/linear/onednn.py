"""Weights in the layout in which the CPU's bfloat16 products read them, so that no call brings them into it again."""

from __future__ import annotations

import os
from typing import Any

import torch

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
