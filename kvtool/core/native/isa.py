"""Instruction sets: which there are, which this machine runs, and which one is taken."""

from __future__ import annotations

import importlib
import os
import platform
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvtool.core.common.machine import ARM, FEATURES, cpu_features
from kvtool.core.errors import KvtoolError


@dataclass(frozen=True, slots=True, repr=False)
class Isa:
    """An instruction set: its name, i32 lanes handled together, LLVM's name of the CPU, and features it must have.

    The CPU is a named level, not the host: the same code everywhere, and an old CPU's code can be tested on a new one.
    Without a name it is the least of its architecture.
    """

    name: str
    width: int
    cpu: str
    features: frozenset[str] = frozenset()
    extra: str = ""

    def __repr__(self) -> str:
        return self.name

    @property
    def converts_float16(self) -> bool:
        """Whether the CPU has instructions for it: LLVM calls a library otherwise."""
        return not self.features.isdisjoint(("f16c", "neon"))


_V3 = frozenset("avx avx2 bmi bmi2 f16c fma lzcnt movbe popcnt".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl avx512vbmi2".split())

AVX512 = Isa("avx512", 16, "x86-64-v4", _V4, "+avx512vbmi2")
AVX2 = Isa("avx2", 8, "x86-64-v3", _V3)
AVX512_BF16 = Isa("avx512bf16", 16, "x86-64-v4", _V4 | {"avx512bf16"}, "+avx512vbmi2,+avx512bf16")
AVX512_VNNI = Isa("avx512vnni", 16, "x86-64-v4", _V4 | {"avx512vnni"}, "+avx512vbmi2,+avx512vnni")
NEON = Isa("neon", 8, "generic", frozenset({"neon"}))  # two registers of four lanes: LLVM splits vectors
NEON_DOT = Isa("neondot", 8, "generic", frozenset({"neon", "asimddp"}), "+dotprod")
SCALAR = Isa("scalar", 8, "")  # lookups one by one; LLVM splits the arithmetic around them into what the CPU has
ISAS = {isa.name: isa for isa in (AVX512, AVX2, NEON, SCALAR)}  # best first
_FORBIDDEN = {"default": ("avx512", "avx2"), "avx2": ("avx512",)}  # by what torch's own kernels are held to


@cache
def llvm() -> Any:
    """Prepare llvmlite.binding for this machine. Raises KvtoolError: it cannot be imported."""
    try:
        binding = importlib.import_module("llvmlite.binding")
    except (ImportError, OSError) as error:
        raise KvtoolError(
            f"llvmlite, which makes the machine code of kernels, cannot be imported: {error}",
            "`pip install --force-reinstall llvmlite` in the environment of kvtool",
        ) from error
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


@cache
def runnable() -> tuple[str, ...]:
    """Return the names of the ISAS that this machine can run, best first: at least `scalar`.

    Vectors that a variable does not name are missing, if it says what the CPU has (`common/machine.py`).
    """
    host = {name for name, present in llvm().get_host_cpu_features().items() if present}
    if platform.machine() in ARM:
        host.add("neon")  # of every 64-bit ARM CPU; not every system lists it
    if os.environ.get(FEATURES):
        told = cpu_features() | ({"neon"} if "asimd" in cpu_features() else set())  # Linux's name of it
        host = {name for name in host if name in told or not name.startswith(("avx", "neon"))}
    return tuple(name for name, isa in ISAS.items() if isa.features <= host)


def best_isa() -> Isa:
    """The best of `runnable()`, no better than what torch's kernels are held to (`ATEN_CPU_CAPABILITY`)."""
    return _best(os.environ.get("ATEN_CPU_CAPABILITY", ""), runnable())


@cache  # asked for each product
def _best(capability: str, names: tuple[str, ...]) -> Isa:
    return next(ISAS[name] for name in names if name not in _FORBIDDEN.get(capability, ()))


def isa_here() -> Isa | None:
    """For kernels that without vectors would be slower than torch's; None: the CPU has none."""
    isa = best_isa()
    return None if isa is SCALAR else isa


def multiplies_bfloat16(isa: Isa | None) -> bool:
    """Whether the CPU multiplies pairs of bfloat16 by instructions on top of this set (`AVX512_BF16`)."""
    return isa is AVX512 and "avx512bf16" in cpu_features()


def multiplies_int8(isa: Isa) -> Isa | None:
    """The set that multiplies 8-bit integers on top of this one; None: the CPU has none."""
    if isa is AVX512 and "avx512vnni" in cpu_features():
        return AVX512_VNNI
    if isa is NEON and "asimddp" in cpu_features():
        return NEON_DOT
    return isa if isa in (AVX512, AVX2) else None
