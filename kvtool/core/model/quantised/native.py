"""Products and unpacking of packed weights as calls, on torch's threads."""

from __future__ import annotations

import ctypes
import threading
from functools import cache

import torch

from kvtool.core.model.quantised import ir_codes, ir_share
from kvtool.core.model.quantised.ir_matvec import product
from kvtool.core.model.quantised.ir_share import FIELDS, share
from kvtool.core.model.quantised.ir_unpack import unpack
from kvtool.core.model.quantised.matrix import LAYOUTS, Matrix
from kvtool.core.native.compiling import ISAS, compiled, runnable
from kvtool.core.native.team import run_in_team

_Job = ctypes.c_int64 * len(FIELDS)
_compiling = threading.Lock()
_SHARES = 4  # of each thread: one that is kept waiting leaves its rest to the others
_HELD = {"DEFAULT": ("scalar",), "AVX2": ("avx2", "scalar")}


def best_isa() -> str | None:
    """The best of `runnable()`, no better than what torch's kernels are held to (ATEN_CPU_CAPABILITY); None: none."""
    allowed = _HELD.get(torch.backends.cpu.get_cpu_capability(), runnable())
    return next((name for name in runnable() if name in allowed), None)


def multiply(matrix: Matrix, x: torch.Tensor, isa: str | None = None) -> torch.Tensor:
    """W · x, float32 `[rows]`, of a contiguous float32 `[columns]`.

    Parameters
    ----------
    isa : one of `runnable()`; None: `best_isa()`.

    Raises
    ------
    ValueError : x does not fit.
    """
    if x.dtype != torch.float32 or x.shape != (matrix.columns,) or not x.is_contiguous():
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, not float32 [{matrix.columns}]")
    y = torch.empty(matrix.rows)
    _run(_functions(matrix.kind, isa)["product"], matrix, x.data_ptr(), y.data_ptr(), 0, matrix.rows)
    return y


def unpack_rows(matrix: Matrix, first: int, last: int, out: torch.Tensor, isa: str | None = None) -> torch.Tensor:
    """Write rows of weights, rounded to bfloat16, to the beginning of `out`; returns them `[last - first, columns]`.

    Plain numbers are not rounded further.

    Parameters
    ----------
    out : contiguous, float32 or bfloat16.
    isa : one of `runnable()`; None: `best_isa()`.

    Raises
    ------
    ValueError : there are no such rows, or there is no room.
    """
    size = (last - first) * matrix.columns
    if not 0 <= first <= last <= matrix.rows or not out.is_contiguous() or out.numel() < size:
        raise ValueError(f"rows {first} to {last} of {matrix.rows}, into {out.numel()} numbers")
    rows = out.view(-1)[:size].view(last - first, matrix.columns)
    if matrix.layout.dense:
        return rows.copy_(matrix.data[first:last])
    to = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[out.dtype]
    start = out.data_ptr() - first * matrix.columns * out.itemsize
    _run(_functions(matrix.kind, isa)[to], matrix, 0, start, first, last)
    return rows


def _run(function: int, matrix: Matrix, x: int, out: int, first: int, last: int) -> None:
    threads = torch.get_num_threads()
    share = max(1, -(-(last - first) // (_SHARES * threads)))
    parts = (part.data_ptr() for part in (matrix.data, matrix.scales, matrix.mins))
    job = _Job(first, share, last, matrix.columns, *parts, x, out)
    run_in_team(function, ctypes.addressof(job), threads)


def _functions(kind: str, isa: str | None) -> dict[str, int]:
    name = isa or best_isa()
    if name is None:
        raise RuntimeError("there is no machine code here")
    with _compiling:
        return _compiled(kind, name)


@cache
def _compiled(kind: str, name: str) -> dict[str, int]:
    """Addresses of a kind's functions: "product", and unpacking to "float32" and "bfloat16"."""
    isa, names = ISAS[name], {"product": f"product_{kind}"}
    text = ir_codes.declarations() + ir_share.declarations() + product(isa, kind)
    for to in () if LAYOUTS[kind].dense else ("float32", "bfloat16"):
        names[to] = f"unpack_{kind}_{to}"
        text += unpack(isa, kind, to)
    text += "".join(share(function) for function in names.values())
    addresses = compiled(text, isa, *(f"share_{function}" for function in names.values()))
    return dict(zip(names, addresses, strict=True))
