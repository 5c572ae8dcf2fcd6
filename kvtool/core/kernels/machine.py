"""Machine: what kernels can be compiled for here, an instruction set or Triton."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from kvtool.core.native.compiling import runnable
from kvtool.core.native.isa import ISAS, SCALAR, Isa

_HELD = {"DEFAULT": ("scalar",), "AVX2": ("avx2", "scalar")}


def best_isa() -> str | None:
    """Return the best of `runnable()`, no better than what torch's kernels are held to (`ATEN_CPU_CAPABILITY`); None:
    there is no machine code here."""
    there = runnable()
    allowed = _HELD.get(torch.backends.cpu.get_cpu_capability(), there)
    return next((name for name in there if name in allowed), None)


def isa_here() -> Isa | None:
    """Return the best instruction set with vectors, for kernels that without them would be slower than torch's; None:
    there is none."""
    isa = ISAS.get(best_isa() or "")
    return None if isa is SCALAR else isa


def has_triton() -> bool:
    """Return whether there is Triton; asked for at every layer, so looked for once."""
    return _found(importlib.util.find_spec)


@functools.cache
def _found(find: Callable[[str], Any]) -> bool:
    return find("triton") is not None
