"""Products of few rows with weights that oneDNN has laid out, as calls on torch's threads; no second copy is kept."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import cache

import torch

from kvtool.core.kernels.linear.onednn_few_rows_ir import JOB, OUTPUTS, ROWS, module
from kvtool.core.native.isa import AVX512_BF16, isa_here, multiplies_bfloat16
from kvtool.core.native.jit import Function, compiled
from kvtool.core.native.threads import launch

MOST_ROWS = 320  # beyond, oneDNN's own products are as fast
_SHARES = 4  # of each thread: one that is kept waiting leaves its rest to the others
_PROBED = 512  # numbers of a weight that must lie where they are expected
_compiling = threading.Lock()


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight `[outputs, columns]` in oneDNN's layout of panels, and the bias.

    Attributes
    ----------
    kept : what owns the memory at `address`.
    bias : float32 `[outputs]`.
    """

    kept: torch.Tensor
    address: int
    outputs: int
    columns: int
    bias: torch.Tensor

    @classmethod
    def of(cls, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Panels | None:
        """Find a packed bfloat16 weight's panels; None: it is laid out otherwise, or there is no code for this CPU.

        Parameters
        ----------
        weight : as it was before.
        """
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

    def serves(self, rows: int) -> bool:
        """Whether so many rows are multiplied faster here."""
        return ROWS <= rows <= MOST_ROWS

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """X · Wᵀ, bfloat16 `[rows, outputs]`.

        Parameters
        ----------
        x : bfloat16 `[rows, columns]`, contiguous, of at least `ROWS` rows.
        """
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
        launch(_function(), ctypes.addressof(job), min(threads, panels))
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


def _function() -> Function:
    with _compiling:
        return _compiled()


@cache
def _compiled() -> Function:
    return compiled(module(), AVX512_BF16, "panels")[0]
