"""This machine: the number format that its CPU multiplies fast, its cores, its load, errors for lack of memory, and the
variables that choose how the same is computed. Imports no torch, so that every command asks.

Formats are derived from the features of the CPU and its libraries, never from timing.

Measured with torch 2.13, GFLOP/s of one core, 512 rows times a weight: bfloat16 480 and float32 105 where the CPU has
`avx512_bf16`; bfloat16 82 where oneDNN may use only AVX-512, 25 with AVX2, 9 without; times a weight laid out the
other way, as the codec's, 2.6. float16 is at 25. What ATEN_CPU_CAPABILITY forbids changes none of these.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtool.core.errors import UsageError, did_you_mean

FEATURES = "KVTOOL_CPU_FEATURES"  # names as Linux lists them, in place of what the CPU has
FLOAT32 = "float32"
# Features that KVTOOL_CPU_FEATURES may name although the CPU lacks them: all that numbers are multiplied or coded with.
_TELLABLE = (
    *("sse", "sse2", "sse3", "pni", "ssse3", "sse4_1", "sse4_2", "sse4a", "popcnt", "abm", "lzcnt", "movbe", "f16c"),
    *("fma", "bmi1", "bmi2", "aes", "pclmulqdq", "vaes", "vpclmulqdq", "gfni", "avx", "avx2", "avx_vnni", "avx_ifma"),
    *("avx_vnni_int8", "avx_vnni_int16", "avx_ne_convert", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    *("avx512ifma", "avx512vbmi", "avx512_vbmi2", "avx512_vnni", "avx512_bitalg", "avx512_vpopcntdq", "avx512_bf16"),
    *("avx512_fp16", "avx512_vp2intersect", "avx10_1", "avx10_2", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("fp", "asimd", "asimdhp", "fphp", "asimddp", "asimdfhm", "bf16", "i8mm", "sve", "sve2", "svebf16", "svei8mm"),
)
# Instructions that multiply bfloat16. Apple's CPUs have "bf16" and do not count: torch has no oneDNN there, and its own
# products are slower.
_INSTRUCTIONS = frozenset({"avx512bf16", "amxbf16", "bf16"})
# oneDNN computes torch's products of bfloat16, and may be held to less than the CPU has.
_ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_LIMITED = frozenset({"sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni"})
_CPUINFO = Path("/proc/cpuinfo")
_NO_MEMORY = ("out of memory", "outofmemory", "not enough memory", "can't allocate memory")
_BUSY = 0.5  # processes a core, as the load average of the last minute has them
X86, ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")  # as systems name 64-bit machines

INT8 = "int8"  # of products of packed weights; all else is float32 then
NUMBER_FORMATS, DEVICE_KINDS = ("bfloat16", "float16", "float32", INT8), ("cpu", "cuda", "mps", "vllm")


class Arithmetic(NamedTuple):
    """The arithmetic of a model: a number format, and a kind of device, or "vllm", whose kernels round otherwise."""

    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.dtype} on {self.device}"


def cpu_features() -> frozenset[str]:
    """Return what the CPU can do, without `_` and `-`: `avx512bf16`; empty if unknown. Raises UsageError."""
    return _features(os.environ.get(FEATURES, "").strip() or None)


def is_fast(dtype: str) -> bool:
    """Return True if the CPU multiplies this format at least as fast as float32. Imports no torch."""
    if dtype == "bfloat16":
        return not _INSTRUCTIONS.isdisjoint(cpu_features()) and _held_back_by() is None
    return dtype in (FLOAT32, INT8)


def product_dtype(dtype: str, device: str = "cpu") -> str:
    """Return the format to multiply numbers of `dtype` in: their own, or float32 where a CPU is slow in it."""
    return dtype if device != "cpu" or is_fast(dtype) else FLOAT32


def why_float32(dtype: str) -> str:
    limit = _held_back_by()
    return f"{limit} forbids {dtype} products" if limit else f"this CPU has no fast {dtype} products"


def lacks_avx2() -> bool:
    """Return True for an x86 CPU from before AVX2 (2013, or a cheaper one), as far as its features are known."""
    features = cpu_features()
    return platform.machine() in X86 and bool(features) and "avx2" not in features


def _held_back_by() -> str | None:
    return next((name for name in _ISA_LIMITS if os.environ.get(name, "").lower() in _LIMITED), None)


@functools.cache
def _features(forced: str | None) -> frozenset[str]:
    if forced is not None:
        _check(forced.split())
        return _plain(forced.split())
    return _plain(_cpuinfo("flags", "Features").split())  # macOS has no such file, and no feature that matters here


def _cpuinfo(*fields: str) -> str:
    with suppress(OSError):
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(fields):
                return line.partition(":")[2].strip()
    return ""


def _check(named: list[str]) -> None:
    features = _plain(_TELLABLE) | _features(None)
    stray = next((name for name in named if not _plain([name]) <= features), None)
    if stray is not None:
        near = did_you_mean(stray, _TELLABLE)
        allowed = f"names as Linux lists them, a space between: {' '.join(_TELLABLE)}"
        raise UsageError(f"{FEATURES} names {stray!r}, which no CPU has", f"{near} {allowed}".strip())


def _plain(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.lower().replace("_", "").replace("-", "") for name in names)


@functools.cache
def cpu_name() -> str:
    name = _cpuinfo("model name") or _cpuinfo("Model") or _cpuinfo("Hardware")  # the last two on ARM
    return " ".join(name.split()) or platform.processor() or platform.machine()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_busy() -> bool:
    """Return True if other work uses the cores, so that times measured now are not the machine's own."""
    try:
        return os.getloadavg()[0] > _BUSY * (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return False


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of Python or torch that says that memory ran out. Torch need not be imported."""
    message = f"{type(error).__name__} {error}".lower()
    return isinstance(error, MemoryError) or any(words in message for words in _NO_MEMORY)


ATTENTION, STEPPER = SWITCHES = ("KVTOOL_ATTENTION", "KVTOOL_STEPPER")
ALLOWED: dict[str, tuple[str, ...]] = {
    ATTENTION: ("triton", "flash", "sdpa", "eager"),  # those of `kernels/attention/dispatch.py`
    STEPPER: ("native", "torch"),
}


def asked(variable: str) -> str:
    """Return the value of one of SWITCHES; "" if it is not set. Raises UsageError."""
    value = os.environ.get(variable, "")
    if value and value not in ALLOWED[variable]:
        hint = did_you_mean(value, ALLOWED[variable]) or f"unset {variable}, and the fastest is taken"
        raise UsageError(f"{variable}={value!r} is none of {', '.join(ALLOWED[variable])}", hint)
    return value


def check_switches() -> None:
    for variable in SWITCHES:
        asked(variable)
    cpu_features()
