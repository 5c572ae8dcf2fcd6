"""Weights in the layout in which the CPU's bfloat16 products read them, so that no call brings them into it again."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.core.kernels.linear.modules import SmallBatchLinear
from kvtool.core.native import builder
from kvtool.core.native.builder import Fields, FunctionBuilder, Value
from kvtool.core.native.gemm import accumulate
from kvtool.core.native.isa import AVX512_BF16, isa_here, multiplies_bfloat16
from kvtool.core.native.jit import Function, compile_once, compiled
from kvtool.core.native.job import Job, WorkQueue
from kvtool.core.native.threads import launch

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
    changed.reordered, changed.panels = packed, OneDnnBlockedWeight.of(packed, linear.weight, linear.bias)
    if not keep:  # its shape stays known
        changed.weight = torch.nn.Parameter(linear.weight.to("meta"), requires_grad=False)


class ReorderedLinear(SmallBatchLinear):
    reordered: torch.Tensor
    panels: OneDnnBlockedWeight | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self.reordered, self.bias, "none", [], "")
        return out

    def in_team(self, rows: int, dtype: torch.dtype) -> bool:
        return self.panels is not None and ROWS <= rows <= MOST_ROWS  # beyond, oneDNN's own products are as fast

    def _few(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.panels is not None
        return self.panels.multiply(rows)


def keep_few_kernels() -> None:
    """Bound what a process that meets many prompt lengths keeps of code for products; before its first product.

    For every number of rows oneDNN makes a kernel a weight's shape, 0.3 to 0.7 MB in 0.5 ms, and would keep 1,024, as
    would torch once more. A prompt takes 9. Variables that are already set are not changed.
    """
    for name in KERNELS_KEPT:
        os.environ.setdefault(name, _KEPT)


MOST_ROWS = 320
_SHARES = 4  # of each thread: a slow one leaves its rest to the others
_PROBED = 512  # numbers of a weight that must be where they are expected


@dataclass(frozen=True, slots=True)
class OneDnnBlockedWeight:
    """A weight `[outputs, columns]` in oneDNN's layout of panels, and the bias."""

    kept: torch.Tensor  # owns the memory at `address`
    address: int
    outputs: int
    columns: int
    bias: torch.Tensor  # float32 `[outputs]`

    @classmethod
    def of(cls, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> OneDnnBlockedWeight | None:
        """Find the panels of a weight; None: it is laid out otherwise, or there is no code for this CPU."""
        outputs, columns = weight.shape
        if not multiplies_bfloat16(isa_here()) or not hasattr(torch.ops.mkldnn, "data_ptr"):
            return None
        size = int(torch.ops.mkldnn._nbytes(packed))
        if weight.dtype != torch.bfloat16 or outputs % OUTPUTS or columns % 2 or size != 2 * outputs * columns:
            return None
        address = int(torch.ops.mkldnn.data_ptr(packed))
        if not _lies_in_panels(address, weight):
            return None
        added = torch.zeros(outputs, dtype=torch.float32) if bias is None else bias.detach().float().contiguous()
        return cls(packed, address, outputs, columns, added)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return X · Wᵀ, bfloat16 `[rows, outputs]`; x is contiguous, of at least `ROWS` rows."""
        fits = x.dtype == torch.bfloat16 and x.is_contiguous() and x.is_cpu and x.dim() == 2
        if not fits or x.shape[0] < ROWS or x.shape[1] != self.columns:
            raise ValueError(f"no product of {x.dtype} {tuple(x.shape)} with {self.outputs} × {self.columns} weights")
        out = torch.empty((x.shape[0], self.outputs), dtype=torch.bfloat16)
        threads, panels = torch.get_num_threads(), self.outputs // OUTPUTS
        share = max(1, panels // (_SHARES * threads))
        job = JOB.pack(
            **{"next": 0, "share": share, "panels": panels, "weights": self.address, "columns": self.columns},
            **{"x": x.data_ptr(), "rows": x.shape[0], "out": out.data_ptr(), "bias": self.bias.data_ptr()},
        )
        launch(_function(), job, min(threads, panels))
        return out


def _lies_in_panels(address: int, weight: torch.Tensor) -> bool:
    """Whether numbers drawn from a weight are found where panels have them."""
    outputs, columns = weight.shape
    numbers = (ctypes.c_int16 * weight.numel()).from_address(address)
    laid = torch.frombuffer(numbers, dtype=torch.int16).view(outputs // OUTPUTS, columns // 2, OUTPUTS, 2)
    draw = torch.Generator().manual_seed(0)
    row, column = (torch.randint(end, (_PROBED,), generator=draw) for end in weight.shape)
    found = laid[row // OUTPUTS, column // 2, row % OUTPUTS, column % 2]
    return torch.equal(found, weight.detach()[row, column].view(torch.int16))


@compile_once
def _function() -> Function:
    return compiled(panels_module(), AVX512_BF16, "panels")[0]


OUTPUTS = 64  # of a panel
ROWS = 8  # of X in a tile: the least that there must be
_WIDTH = AVX512_BF16.width
_VECTORS = 2  # of outputs in a tile: sixteen sums, and few loads of weights, which come from a second cache
_LINES = OUTPUTS // _WIDTH  # of a pair of columns
# `next` is the first panel that no thread has taken yet, `share` how many are taken at once.
JOB = Job(
    **{"next": "i64", "share": "i64", "panels": "i64", "weights": "i16*", "columns": "i64", "x": "i16*", "rows": "i64"},
    **{"out": "bfloat16*", "bias": "float*"},
)


def panels_module() -> str:
    """Write `void panels(ptr job)`, Y = X · Wᵀ for few rows of X: any number of threads may run the same job.

    W is laid out in panels of 64 outputs, each `[columns / 2, 64, 2]`: pairs of columns, as AVX-512 BF16 multiplies
    them. oneDNN's own products of 32 rows wait for each panel to come from memory; here the next one is asked for while
    this one is multiplied.
    """
    k = FunctionBuilder("panels", AVX512_BF16, "i64* job")
    job = JOB.load(k, k.args.job)
    with WorkQueue(k, k.args.job, job.share, job.panels) as queue, k.loop(queue.last - queue.first) as index:
        _panel(k, job, queue.first + index)
    return builder.module(k)


def _panel(k: FunctionBuilder, job: Fields, panel: Value) -> None:
    size = job.columns * OUTPUTS
    weights = job.weights.at(panel * size)
    next_panel, output = weights.at(size), panel * OUTPUTS
    tiles = _LINES // _VECTORS
    with k.loop((job.rows + (ROWS - 1)) // ROWS * tiles) as tile:
        row = k.minimum(tile // tiles * ROWS, job.rows - ROWS, signed=True)
        across = tile % tiles * (_VECTORS * _WIDTH)
        line = (tile & (_LINES - 1)) * (2 * _WIDTH)
        x = job.x.at(row * job.columns)
        own = weights.of("i32").at(across).of("i16")
        _store(job, _sums(k, job.columns, x, own, next_panel.at(line)), row, output + across)


def _sums(k: FunctionBuilder, columns: Value, x: Value, weights: Value, ahead: Value) -> list[Value]:
    """Every step asks for a line of the next panel, each tile of four for another one."""
    rows = [x.at(columns * number).of("i32") for number in range(ROWS)]

    def factors(step: Value) -> tuple[Iterable[Value], list[Value]]:
        place = step * (2 * OUTPUTS)
        k.call_void("llvm.prefetch.p0", ahead.at(place), *(k.constant("i32", number) for number in (0, 2, 1)))
        own = weights.at(place).of("i32")
        loaded = [own.load(number * _WIDTH, _WIDTH) for number in range(_VECTORS)]
        return (row.load(step).splat(_WIDTH) for row in rows), loaded

    return accumulate(columns // 2, [k.zeros(_WIDTH)] * (ROWS * _VECTORS), factors, pairs=True)


def _store(job: Fields, sums: list[Value], row: Value, output: Value) -> None:
    width = job.panels * OUTPUTS
    for vector in range(_VECTORS):
        place = output + vector * _WIDTH
        bias = job.bias.load(place, _WIDTH)
        for number in range(ROWS):
            at = (row + number) * width
            job.out.store(sums[number * _VECTORS + vector] + bias, at + place)
