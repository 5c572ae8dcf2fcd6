"""Which coder runs here, and its machine code: compiled from LLVM IR in the process, once, without a C compiler."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from kvtool.core.codec.entropy import ir_scalar
from kvtool.core.codec.entropy.ir import AVX2, AVX512, SCALAR, Isa
from kvtool.core.codec.entropy.ir_decode import KINDS as DECODERS
from kvtool.core.codec.entropy.ir_decode import decode_module
from kvtool.core.codec.entropy.ir_encode import encode_module
from kvtool.core.codec.entropy.ir_symbols import symbols_module
from kvtool.core.errors import UsageError

VARIABLE = "KVTOOL_ENTROPY_CODER"
ISAS = {"avx512": AVX512, "avx2": AVX2, "scalar": SCALAR}  # best first
NUMPY = "numpy"
ENCODE, ENCODE_CONTEXTS, SYMBOLS = "encode", "encode with contexts", "symbols"
KINDS = (*DECODERS, ENCODE, ENCODE_CONTEXTS, SYMBOLS)

Kernel = Callable[[int, int], None]  # address of the jobs' fields, number of jobs; the GIL is free while it runs

_OPTIMISATION = 2  # 3 takes as long and gives the same speed; 1 gives 10 % less
_X86 = ("x86_64", "AMD64")
_compiling = threading.Lock()
_engines: list[Any] = []  # own the machine code: never freed


@cache
def available() -> tuple[str, ...]:
    """Back-ends this machine can run, best first; `numpy` is always there."""
    llvm = _llvm()
    if llvm is None:
        return (NUMPY,)
    host = {name for name, present in llvm.get_host_cpu_features().items() if present}
    return (*(name for name, isa in ISAS.items() if isa.features <= host), NUMPY)


def chosen() -> str:
    """The back-end to use: the one KVTOOL_ENTROPY_CODER names, else the best there is.

    Raises
    ------
    UsageError : the variable names a back-end that does not exist, or that this machine cannot run.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return available()[0]
    if name not in available():
        raise UsageError(f"{VARIABLE}={name}: no such entropy coder here", f"one of {', '.join(available())}, or unset")
    return name


def compile_ahead(dtype: str) -> None:
    """Compile what decodes to numbers of this format, before anybody waits for it."""
    for kind in (dtype, "int16"):  # as it is, and what a finer level refines
        kernel(kind)


def kernel(kind: str) -> Kernel | None:
    """The function for one of KINDS, compiled at its first use; None: the numpy reference is to be used.

    Raises
    ------
    UsageError : see `chosen`; or the back-end it names cannot be compiled.
    """
    name = chosen()
    if name == NUMPY:
        return None
    with _compiling:
        try:
            return _kernel(name, kind)
        except RuntimeError as error:
            if os.environ.get(VARIABLE):
                raise UsageError(f"{VARIABLE}={name}: it cannot be compiled: {error}", "unset it") from error
            _warn_slow(str(error))
            return None


def compiled(text: str, isa: Isa) -> int:
    """Address of the function `run` of an LLVM IR module, in machine code that lives as long as the process.

    Raises
    ------
    RuntimeError : the text is not LLVM IR, or there is no code for this machine.
    """
    llvm = _llvm()
    if llvm is None:
        raise RuntimeError("llvmlite cannot be imported")
    least = "x86-64" if platform.machine() in _X86 else ""
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=isa.cpu or least, features=isa.extra, opt=_OPTIMISATION)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address("run"))


@cache
def _kernel(name: str, kind: str) -> Kernel:
    """Compile; callers hold the lock, so no kernel is compiled twice."""
    address = compiled(_text(ISAS[name], kind), ISAS[name])
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(address)


def _text(isa: Isa, kind: str) -> str:
    if kind == SYMBOLS:
        return symbols_module()
    if kind in (ENCODE, ENCODE_CONTEXTS):
        return encode_module(isa, kind == ENCODE_CONTEXTS)
    return ir_scalar.decode_module(kind) if isa is SCALAR else decode_module(isa, kind)


@cache
def _llvm() -> Any:
    """llvmlite.binding, ready to compile for this machine; None where it cannot be imported."""
    try:
        llvm = importlib.import_module("llvmlite.binding")
    except (ImportError, OSError) as error:
        _warn_slow(str(error))
        return None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@cache
def _warn_slow(reason: str) -> None:
    """Say once that decoding takes ten times as long, and why."""
    warnings.warn(f"the entropy coder runs in numpy: {reason}", RuntimeWarning, stacklevel=2)
