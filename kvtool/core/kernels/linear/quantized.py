"""Products and unpacking of packed weights as calls, on torch's threads."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import pad

from kvtool.core.kernels import COMPUTED, FORMATS
from kvtool.core.kernels.linear import int8_ir
from kvtool.core.kernels.linear.gemm_ir import (
    OUTPUTS,
    SHARE_JOB,
    SMALL_GEMM_JOB,
    product,
    share,
    small_gemm,
    tile_rows,
    unpack,
)
from kvtool.core.kernels.linear.qtensor import BLOCK, LAYOUTS, QuantizedTensor
from kvtool.core.native.builder import module
from kvtool.core.native.isa import AVX512_BF16, Isa, best_isa, multiplies_bfloat16, multiplies_int8
from kvtool.core.native.jit import LINE, Function, address, compile_once, compiled, scratch
from kvtool.core.native.threads import launch

_UNPACKED_AT_ONCE = 16  # rows of weights that are unpacked before they are multiplied
_FEW = 256  # rows of X at a time: both stay in a core's own cache
_INT8_ROWS = 512  # rows of X at a time, of a byte a number
_SHARES = 4  # of each thread: one that is kept waiting leaves its rest to the others


def gemv(matrix: QuantizedTensor, x: torch.Tensor, isa: Isa | None = None, int8: bool = False) -> torch.Tensor:
    """Return W · x, float32 `[rows]`, of a contiguous float32 `[columns]`; ValueError: x does not fit.

    With `int8` x is rounded to 8-bit integers, where `has_int8_row` (int8_ir.py).
    """
    if x.dtype != torch.float32 or x.shape != (matrix.columns,) or not x.is_contiguous():
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, not float32 [{matrix.columns}]")
    if not int8:
        function = _compiled(matrix.kind, isa or best_isa())["product"]
    elif (isa := isa or multiplies_int8(best_isa())) is not None and has_int8_row(matrix, isa):
        function = _compiled_row(matrix.kind, isa)
    else:
        raise ValueError(f"no product of an 8-bit row with {matrix.kind} weights of {matrix.columns} columns")
    y = torch.empty(matrix.rows, dtype=torch.float32)
    _run(function, matrix, x.data_ptr(), y.data_ptr(), 0, matrix.rows)
    return y


def small_batch_gemm(
    matrix: QuantizedTensor, x: torch.Tensor, bias: torch.Tensor | None = None, isa: Isa | None = None
) -> torch.Tensor:
    """Return X · Wᵀ for few rows of X, in their format: weights are unpacked some at a time, and rounded to bfloat16.

    X is `[rows, columns]`, contiguous, float32 or bfloat16. Raises ValueError: x or the bias does not fit, or x has
    fewer rows than `least_rows`.
    """
    isa = isa or best_isa()
    if x.dim() != 2 or x.shape[1] != matrix.columns or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"x is {tuple(x.shape)}, not [rows, {matrix.columns}]")
    count, least = x.shape[0], least_rows(matrix, x.dtype, isa)
    if least is None or count < least or (bias is not None and bias.shape != (matrix.rows,)):
        raise ValueError(f"no product of {x.dtype} {tuple(x.shape)} with {matrix.kind} weights of {matrix.rows} rows")
    added = torch.zeros(matrix.rows, dtype=torch.float32) if bias is None else bias.float().contiguous()
    out = torch.empty((count, matrix.rows), dtype=x.dtype)
    function = _few(matrix.kind, FORMATS[x.dtype], isa)
    blocks = -(-count // _FEW)  # as even as can be: the last one must not have fewer rows than the code takes
    for first, stop in pairwise(count * number // blocks for number in range(blocks + 1)):
        _multiply_block(function, matrix, x[first:stop], out[first:stop], added)
    return out


def _multiply_block(
    function: Function, matrix: QuantizedTensor, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor
) -> None:
    threads = torch.get_num_threads()
    share = min(_UNPACKED_AT_ONCE, max(OUTPUTS, matrix.rows // (_SHARES * threads) // OUTPUTS * OUTPUTS))
    size = -(-share * matrix.columns * x.itemsize // LINE) * LINE
    unpacked = scratch("unpacked", threads * size, "uint8")
    job = SMALL_GEMM_JOB.pack(
        **{"next": 0, "thread": 0, "share": share, "last": matrix.rows, "columns": matrix.columns},
        **_parts(matrix),
        **{"x": x.data_ptr(), "rows": x.shape[0], "out": out.data_ptr(), "outputs": matrix.rows},
        **{"bias": bias.data_ptr(), "scratch": address(unpacked), "scratch_bytes": size},
    )
    launch(function, job, threads)


def _parts(matrix: QuantizedTensor) -> dict[str, int]:
    return {name: getattr(matrix, name).data_ptr() for name in ("data", "scales", "group_mins")}


def least_rows(matrix: QuantizedTensor, dtype: torch.dtype, isa: Isa | None = None) -> int | None:
    """The least rows that `small_batch_gemm` takes for a matrix; None: no code for it."""
    isa = isa or best_isa()
    if dtype not in COMPUTED or matrix.rows % OUTPUTS:
        return None
    if dtype == torch.bfloat16 and not multiplies_bfloat16(isa):
        return None
    fits = matrix.columns % (isa.width * (2 if dtype == torch.bfloat16 else 1)) == 0
    return tile_rows(isa) if fits and (not matrix.layout.dense or matrix.data.dtype == dtype) else None


@compile_once
def _few(kind: str, element: str, isa: Isa) -> Function:
    isa = AVX512_BF16 if element == "bfloat16" else isa
    functions = [small_gemm(isa, kind, element)]
    if not LAYOUTS[kind].dense:
        functions.append(unpack(isa, kind, element))
    return compiled(module(*functions), isa, functions[0].name)[0]


def int8_gemm(
    matrix: QuantizedTensor, x: torch.Tensor, bias: torch.Tensor | None = None, isa: Isa | None = None
) -> torch.Tensor:
    """Return X · Wᵀ, float32, with X rounded to 8-bit integers, a scale for each group of columns (int8_ir.py).

    X is `[rows, columns]`, contiguous, float32. Raises ValueError: it or the bias does not fit, or there is no code for
    the matrix (`has_int8`).
    """
    isa, count = isa or multiplies_int8(best_isa()), len(x)
    fits = x.dtype == torch.float32 and x.shape[1:] == (matrix.columns,) and x.is_contiguous()
    if isa is None or not has_int8(matrix, isa) or not fits or (bias is not None and len(bias) != matrix.rows):
        raise ValueError(f"no product of {x.dtype} {tuple(x.shape)} with {matrix.kind} weights of {matrix.rows} rows")
    if count < (least := int8_ir.tile_rows(isa)):
        return int8_gemm(matrix, pad(x, (0, 0, 0, least - count)), bias, isa)[:count]
    added = torch.zeros(matrix.rows, dtype=torch.float32) if bias is None else bias.float().contiguous()
    out = torch.empty((count, matrix.rows), dtype=torch.float32)
    quantize, multiply = _int8(matrix.kind, isa)
    threads, group = torch.get_num_threads(), matrix.layout.group
    size = -(-int8_ir.scratch_bytes(isa, matrix.layout, matrix.columns) // LINE) * LINE
    unpacked = scratch("unpacked", threads * size, "uint8")
    blocks = -(-count // _INT8_ROWS)  # as even as can be: the last one must not have fewer rows than the code takes
    for first, stop in pairwise(count * number // blocks for number in range(blocks + 1)):
        rows, groups = stop - first, matrix.columns // group
        q = torch.empty((rows, matrix.columns), dtype=torch.int8)
        scales, sums = torch.empty((2, rows, groups), dtype=torch.float32)
        x_parts = {"q": q.data_ptr(), "rows": rows, "columns": matrix.columns}
        job = int8_ir.QUANTIZE_JOB.pack(
            **x_parts,
            **{"next": 0, "share": max(1, rows // (_SHARES * threads)), "x": x[first:stop].data_ptr()},
            **{"scales": scales.data_ptr(), "sums": sums.data_ptr()},
        )
        launch(quantize, job, threads)
        job = int8_ir.INT8_JOB.pack(
            **x_parts,
            **_parts(matrix),
            **{"next": 0, "thread": 0, "share": isa.width, "last": matrix.rows, "outputs": matrix.rows},
            **{"x_scales": scales.data_ptr(), "x_sums": sums.data_ptr(), "out": out[first:stop].data_ptr()},
            **{"bias": added.data_ptr(), "scratch": address(unpacked), "scratch_bytes": size},
        )
        launch(multiply, job, threads)
    return out


def has_int8(matrix: QuantizedTensor, isa: Isa | None = None) -> bool:
    isa = isa or multiplies_int8(best_isa())
    return isa is not None and matrix.rows % isa.width == 0 and int8_ir.multiplies(isa, matrix.layout)


def has_int8_row(matrix: QuantizedTensor, isa: Isa | None = None) -> bool:
    isa = isa or multiplies_int8(best_isa())
    if isa is None or not int8_ir.multiplies_row(isa, matrix.layout):
        return False
    return matrix.columns % (BLOCK * int8_ir.blocks_at_once(isa)) == 0


@compile_once
def _compiled_row(kind: str, isa: Isa) -> Function:
    function = int8_ir.row_product(isa, kind)
    taken = share(function)
    return compiled(module(function, taken), isa, taken.name)[0]


@compile_once
def _int8(kind: str, isa: Isa) -> tuple[Function, Function]:
    functions = int8_ir.quantize(isa, LAYOUTS[kind].group), int8_ir.int8_gemm(isa, kind)
    quantize, multiply = compiled(module(*functions), isa, *(function.name for function in functions))
    return quantize, multiply


def dequantize_rows(
    matrix: QuantizedTensor, first: int, last: int, out: torch.Tensor, isa: Isa | None = None
) -> torch.Tensor:
    """Write rows of weights, rounded to bfloat16 unless plain, to `out`; returns them `[last - first, columns]`.

    Raises ValueError: the rows do not exist, or `out` is too small.
    """
    size = (last - first) * matrix.columns
    if not 0 <= first <= last <= matrix.rows or not out.is_contiguous() or out.numel() < size:
        raise ValueError(f"rows {first} to {last} of {matrix.rows}, into {out.numel()} numbers")
    rows = out.view(-1)[:size].view(last - first, matrix.columns)
    if matrix.layout.dense:
        return rows.copy_(matrix.data[first:last])
    to = FORMATS[out.dtype]
    start = out.data_ptr() - first * matrix.columns * out.itemsize
    _run(_compiled(matrix.kind, isa or best_isa())[to], matrix, 0, start, first, last)
    return rows


def unpacked(matrix: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    return dequantize_rows(matrix, 0, matrix.rows, torch.empty(matrix.rows, matrix.columns, dtype=dtype))


def _run(function: Function, matrix: QuantizedTensor, x: int, out: int, first: int, last: int) -> None:
    threads = torch.get_num_threads()
    share = max(1, -(-(last - first) // (_SHARES * threads)))
    taken = {"next": first, "share": share, "last": last, "columns": matrix.columns}
    job = SHARE_JOB.pack(**taken, **_parts(matrix), x=x, out=out)
    launch(function, job, threads)


@compile_once
def _compiled(kind: str, isa: Isa) -> dict[str, Function]:
    functions = {"product": product(isa, kind)}
    for to in () if LAYOUTS[kind].dense else ("float32", "bfloat16"):
        functions[to] = unpack(isa, kind, to)
    shares = [share(function) for function in functions.values()]
    entries = compiled(module(*functions.values(), *shares), isa, *(function.name for function in shares))
    return dict(zip(functions, entries, strict=True))
