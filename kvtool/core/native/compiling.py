"""LLVM IR → machine code in this process, without a C compiler; which instruction sets this machine can run."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import platform
import warnings
from functools import cache
from typing import Any

from kvtool.core.common.arithmetic import FEATURES, cpu_features
from kvtool.core.native.isa import ISAS, Isa
from kvtool.core.native.objects import keep_code, kept_code, key_of

_OPTIMISATION = 2  # 3 takes as long and gives the same speed; 1 gives 10 % less
_X86 = ("x86_64", "AMD64")
_CALLABLE = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
_engines: list[Any] = []  # own the machine code: never freed


@cache
def runnable() -> tuple[str, ...]:
    """Names of the ISAS that this machine can run, best first; none where llvmlite cannot be imported.

    Where a variable says what the CPU has (`common/arithmetic.py`), vectors that it does not name are not there.
    """
    llvm = _llvm()
    if llvm is None:
        return ()
    host = {name for name, present in llvm.get_host_cpu_features().items() if present}
    if os.environ.get(FEATURES):
        told = cpu_features()
        host = {name for name in host if name in told or not name.startswith("avx")}
    return tuple(name for name, isa in ISAS.items() if isa.features <= host)


class Function:
    """Machine code that is called with up to four addresses or whole numbers; the GIL is free meanwhile.

    Attributes
    ----------
    address : by which other machine code calls it.
    """

    __slots__ = ("_call", "address")

    def __init__(self, address: int) -> None:
        self.address = address
        self._call = _CALLABLE(address)

    def __call__(self, first: int, second: int = 0, third: int = 0, fourth: int = 0) -> None:
        """Call it in this thread; what it does not take it does not look at."""
        self._call(first, second, third, fourth)


def compiled(text: str, isa: Isa, *names: str) -> tuple[Function, ...]:
    """Compile functions of an LLVM IR module to machine code that lives as long as the process.

    The code is kept on disk for the next process (`objects`).

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
    key = key_of(*_compiler(llvm), target.triple, isa.cpu or least, isa.extra, text)
    code = kept_code(key)
    if code is None:
        code = machine.emit_object(llvm.parse_assembly(text))
        keep_code(key, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return tuple(Function(int(engine.get_function_address(name))) for name in names)


def _compiler(llvm: Any) -> tuple[str, ...]:
    """What makes other code of the same text."""
    version = ".".join(map(str, llvm.llvm_version_info))
    return importlib.metadata.version("llvmlite"), version, str(_OPTIMISATION)


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
    warnings.warn(f"there is no machine code for kernels, which run in numpy: {reason}", RuntimeWarning, stacklevel=2)
