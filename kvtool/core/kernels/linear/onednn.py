"""Weights in the layout in which the CPU's bfloat16 products read them, so that no call brings them into it again."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from typing import Any

import torch

from kvtool.core.kernels.linear.onednn_few_rows import Panels

_ROWS = 160  # a hint for the layout; measured: it serves 1 to 2,048 rows alike
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_LARGE = 2**30
RETURNED_BYTES = 2**22
# What oneDNN and torch's layer above it ask for the number of kernels to keep, at the first product.
KERNELS_KEPT = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_KEPT = "128"


def can_pack(weight: torch.Tensor) -> bool:
    """Whether the CPU has a layout of its own for this weight (oneDNN, bfloat16)."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_weights(model: torch.nn.Module) -> int:
    """Pack every linear layer of a model that is only run forward; returns how many.

    The results stay the same bit for bit. A packed layer keeps no plain weight: gradients cannot pass through it. The
    weight of an LM head tied to the embedding is kept for that.

    Measured, Qwen2.5-0.5B on 2 cores: a product takes .40 of its time with 1 row, .62 with 32, .87 with 160 and .91
    with 2,048; packing takes 0.6 s, about half of it the first reading of the weights.
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
    changed.reordered, changed.panels = packed, Panels.of(packed, linear.weight, linear.bias)
    if not keep:  # its shape stays known
        changed.weight = torch.nn.Parameter(linear.weight.to("meta"), requires_grad=False)


class ReorderedLinear(torch.nn.Linear):
    """A linear layer whose weight oneDNN has laid out, which is only run forward.

    Attributes
    ----------
    reordered : the weight. panels: the same memory, as our own kernel for few rows reads it; None: it does not.
    """

    reordered: torch.Tensor
    panels: Panels | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute `[..., out_features]` of `[..., in_features]`, as torch would, bit for bit."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self.reordered, self.bias, "none", [], "")
        return out

    def in_team(self, rows: int, dtype: torch.dtype) -> bool:
        """Whether `rows_product` multiplies so many rows by machine code of our own, and by none of torch's threads."""
        return self.panels is not None and self.panels.serves(rows)

    def rows_product(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows of a prompt in the way that is fast for so many: sums may come in another order."""
        panels = self.panels
        if panels is None or not panels.serves(rows.numel() // panels.columns):
            return self(rows)  # type: ignore[no-any-return]
        few = rows.reshape(-1, panels.columns).contiguous()
        return panels.multiply(few).view(*rows.shape[:-1], panels.outputs)


def keep_few_kernels() -> None:
    """Bound what a process that meets many prompt lengths keeps of code for products; before its first product.

    For every number of rows oneDNN makes a kernel a weight's shape, 0.3 to 0.7 MB in 0.5 ms, and would keep 1,024, as
    would torch once more. A prompt takes 9. Who sets the variables is left alone.
    """
    for name in KERNELS_KEPT:
        os.environ.setdefault(name, _KEPT)


def keep_freed_memory() -> None:
    """Let the process reuse large blocks that were freed instead of asking the kernel for new pages each time.

    A fresh page costs a fault; packing takes a third of its time so. Does nothing where libc is not glibc.
    """
    _set_thresholds(_LARGE)


def return_freed_memory() -> None:
    """From here on give blocks of 4 MiB and more back once they are freed: for work that needs room more than time."""
    _set_thresholds(RETURNED_BYTES)


def _set_thresholds(size: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, size)
        mallopt(_M_TRIM_THRESHOLD, size)
