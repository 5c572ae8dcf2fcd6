"""The instruction set that kernels are compiled for here."""

from __future__ import annotations

import torch

from kvtool.core.native.compiling import runnable
from kvtool.core.native.isa import AVX2, AVX512, Isa


def isa_here() -> Isa | None:
    """Return the instruction set that kernels beside torch's are made for; None: there is none.

    What holds torch's kernels to less than the CPU has (`ATEN_CPU_CAPABILITY`) holds these too.
    """
    able, there = torch.backends.cpu.get_cpu_capability(), runnable()
    if able == "AVX512" and "avx512" in there:
        return AVX512
    return AVX2 if able.startswith("AVX") and "avx2" in there else None
