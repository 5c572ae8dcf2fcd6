"""Norms, rotation and gate as calls: a job is laid out here, machine code does the rest on torch's threads."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import cache

import torch

from kvtool.core.model.rowwise.ir import AS_LLAMA, JOBS, Rounding, module
from kvtool.core.native.isa import ISAS
from kvtool.core.native.jit import Function, compiled
from kvtool.core.native.threads import launch

ELEMENTS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_ALONE = 2**16  # numbers; fewer are done before a second thread is there
_SHARES = 4  # of each thread: one that is kept waiting leaves its rest to the others
_compiling = threading.Lock()


@dataclass(frozen=True, slots=True)
class Code:
    """The functions of a model's format and activation."""

    functions: dict[str, Function]
    dtype: torch.dtype
    angles: torch.dtype  # of cos and sin

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, more: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `more` to x, if there is any, and normalise by the root of the mean square.

        Parameters
        ----------
        x, more : `[..., count]`, contiguous.
        weight : float32 `[count]`.

        Returns
        -------
        The sum, which is x itself without more, and what the norm makes of it.
        """
        count = weight.numel()
        rows = self._rows(x, count)
        if weight.dtype != torch.float32 or not weight.is_contiguous():
            raise ValueError("a norm's weight is float32 numbers in a row")
        if more is not None and (more.shape != x.shape or self._rows(more, count) != rows):
            raise ValueError(f"{tuple(more.shape)} cannot be added to {tuple(x.shape)}")
        sum_ = x if more is None else torch.empty_like(x)
        y = torch.empty_like(x)
        added = 0 if more is None else more.data_ptr()
        places = {"x": x.data_ptr(), "more": added, "sum": sum_.data_ptr(), "weight": weight.data_ptr()}
        self._run("norm", rows, count, **places, y=y.data_ptr(), count=count, epsilon=epsilon)
        return sum_, y

    def gate(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Set y to act(y) · x, both contiguous; returns y."""
        count = y.shape[-1]
        rows = self._rows(y, count)
        if x.shape != y.shape or self._rows(x, count) != rows:
            raise ValueError(f"no gate for {tuple(y.shape)} and {tuple(x.shape)}")
        self._run("gate", rows, count, x=x.data_ptr(), y=y.data_ptr(), count=count)
        return y

    def turn(self, queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate heads by halves, where they are.

        Parameters
        ----------
        queries, keys : `[rows, heads, head_dim]`, contiguous.
        cos, sin : `[rows, rotary_dim]`, contiguous, in `angles`; the rest of a head stays.
        """
        rows, heads, head_dim = queries.shape
        whole = heads * head_dim
        fit = self._rows(queries, whole) == self._rows(keys, keys[0].numel()) == rows == len(cos)
        alike = keys.shape[2] == head_dim and cos.shape == sin.shape
        if not (fit and alike and cos.shape[1] <= head_dim and cos.shape[1] % 2 == 0):
            raise ValueError(f"{tuple(queries.shape)} and {tuple(keys.shape)} are not rotated by {tuple(cos.shape)}")
        if not all(side.dtype == self.angles and side.is_contiguous() and side.is_cpu for side in (cos, sin)):
            raise ValueError(f"cos and sin are {self.angles} here, in a row")
        tensors = {"queries": queries, "keys": keys, "cos": cos, "sin": sin}
        sizes = {"heads": heads, "kv_heads": keys.shape[1], "head_dim": head_dim, "half": cos.shape[1] // 2}
        self._run("turn", rows, whole, **{name: tensor.data_ptr() for name, tensor in tensors.items()}, **sizes)

    def _rows(self, tensor: torch.Tensor, count: int) -> int:
        """How many rows of so many numbers there are: machine code knows no bounds."""
        if tensor.dtype != self.dtype or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(f"{tensor.dtype} {tuple(tensor.shape)} is no row of {self.dtype} after the other")
        rows, rest = divmod(tensor.numel(), count)
        if rest or not rows:
            raise ValueError(f"{tuple(tensor.shape)} has no rows of {count}")
        return rows

    def _run(self, name: str, rows: int, numbers: int, **values: int | float) -> None:
        threads = torch.get_num_threads() if rows * numbers > _ALONE else 1
        share = -(-rows // (_SHARES * threads)) if threads > 1 else rows
        job = JOBS[name].pack(next=0, share=share, rows=rows, **values)
        launch(self.functions[name], ctypes.addressof(job), threads)


def code_for(isa: str, dtype: torch.dtype, activation: str, rounding: Rounding = AS_LLAMA) -> Code:
    """The code of a format and activation, compiled at its first use.

    Raises
    ------
    RuntimeError : it cannot be compiled here.
    """
    with _compiling:
        return _code(isa, dtype, activation, rounding if dtype == torch.bfloat16 else AS_LLAMA)


@cache
def _code(isa: str, dtype: torch.dtype, activation: str, rounding: Rounding) -> Code:
    functions = compiled(module(ISAS[isa], ELEMENTS[dtype], activation, rounding), ISAS[isa], *JOBS)
    angles = torch.float32 if rounding.rope_in_float32 else dtype
    return Code(dict(zip(JOBS, functions, strict=True)), dtype, angles)
