"""The machine that a bench ran on, as every bench tells it."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvtool.core.common.arithmetic import FEATURES, cpu_features, is_fast
from kvtool.core.common.machine import cores, cpu_name

# What a reader compares CPUs by: how wide their products are, and in which formats. As `cpu_features` spells them.
_TELLING = (
    *("sse42", "avx", "avx2", "fma", "avxvnni", "avxneconvert", "avx512f", "avx512vnni", "avx512bf16", "avx512fp16"),
    *("amxint8", "amxbf16", "neon", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)
# Variables that make a machine do less than it can, or other than by itself.
_HOLDING = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", FEATURES),
    *("KVTOOL_ENTROPY_CODER", "KVTOOL_ATTENTION", "KVTOOL_STEPPER"),
)


@dataclass(frozen=True, slots=True)
class Host:
    """Where figures come from.

    Attributes
    ----------
    cpu : its name, as its maker gives it.
    cpu_features : of what it can do, what figures depend on.
    torch_kernels : the instruction set that torch's own kernels are taken for.
    fast_bfloat16 : whether products in it are faster than in float32.
    threads : of torch.
    held_to : variables by which the machine was told to do less, and what they said.
    accelerator : the first CUDA device's name, what torch was built for, and triton's version; "" where there is none.
    """

    cpu: str
    cpu_features: tuple[str, ...]
    torch: str
    torch_kernels: str
    fast_bfloat16: bool
    threads: int
    cores: int
    held_to: Mapping[str, str]
    accelerator: str = ""

    @classmethod
    def here(cls, threads: int | None = None) -> Host:
        """This machine; `threads`: of what is measured, where these are not torch's own number."""
        found = cpu_features()
        return cls(
            cpu=cpu_name(),
            cpu_features=tuple(name for name in _TELLING if name in found),
            torch=torch.__version__,
            torch_kernels=torch.backends.cpu.get_cpu_capability(),
            fast_bfloat16=is_fast("bfloat16"),
            threads=threads or torch.get_num_threads(),
            cores=cores(),
            held_to={name: os.environ[name] for name in _HOLDING if os.environ.get(name)},
            accelerator=_gpu() if torch.cuda.is_available() else "",
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """The machine in words."""
        formats = "bfloat16 and float32" if self.fast_bfloat16 else "float32 only"
        held = " ".join(f"{name}={value}" for name, value in self.held_to.items())
        return (
            f"{self.cpu}, {self.threads} of {self.cores} cores, fast in {formats}; torch {self.torch} with its "
            f"{self.torch_kernels} kernels{f'; held back by {held}' if held else ''} ({' '.join(self.cpu_features)})"
            f"{f'; {self.accelerator}' if self.accelerator else ''}"
        )


def _gpu() -> str:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, triton {triton}"
