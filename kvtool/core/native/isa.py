"""Instruction sets: which there are, which this machine runs, and which one is taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set: i32 lanes handled together, LLVM's name of the CPU, and the features it must have.

    The CPU is a named level, not the host: the same code everywhere, and an old CPU's code can be tested on a new one.
    Without a name it is the least of its architecture.
    """

    width: int
    cpu: str
    features: frozenset[str] = frozenset()
    extra: str = ""

    @property
    def converts_float16(self) -> bool:
        """Whether the CPU has instructions for it: LLVM calls a library otherwise."""
        return "f16c" in self.features


_V3 = frozenset("avx avx2 bmi bmi2 f16c fma lzcnt movbe popcnt".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl avx512vbmi2".split())

AVX512 = Isa(16, "x86-64-v4", _V4, "+avx512vbmi2")
AVX2 = Isa(8, "x86-64-v3", _V3)
AVX512_BF16 = Isa(16, "x86-64-v4", _V4 | {"avx512bf16"}, "+avx512vbmi2,+avx512bf16")
SCALAR = Isa(8, "")  # lookups one by one; LLVM splits the arithmetic around them into what the CPU has
ISAS = {"avx512": AVX512, "avx2": AVX2, "scalar": SCALAR}  # best first
