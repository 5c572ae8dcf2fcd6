"""Which coder runs here, and its machine code: compiled from LLVM IR in the process, once, without a C compiler."""

from __future__ import annotations

import threading
import warnings
from functools import cache
from typing import Protocol

from kvtool.core.codec.entropy.decode_ir import KINDS as DECODERS
from kvtool.core.codec.entropy.decode_ir import decode_module
from kvtool.core.codec.entropy.encode_ir import (
    encode_module,
    finer_module,
    stray_module,
    symbols_module,
    wider_module,
)
from kvtool.core.common.switches import ENTROPY_CODER, asked
from kvtool.core.errors import UsageError
from kvtool.core.native.isa import ISAS, Isa, best_isa, runnable
from kvtool.core.native.jit import Function, compiled

VARIABLE = ENTROPY_CODER
NUMPY = "numpy"
ENCODE, ENCODE_CONTEXTS, SYMBOLS = "encode", "encode with contexts", "symbols"
FINER, WIDER, STRAY = "finer", "wider", "stray"
KINDS = (*DECODERS, ENCODE, ENCODE_CONTEXTS, SYMBOLS, FINER, WIDER, STRAY)
_OF_NUMBERS = {SYMBOLS: symbols_module, FINER: finer_module, WIDER: wider_module, STRAY: stray_module}

_compiling = threading.Lock()


class Kind(Protocol):
    """A kernel that is none of KINDS: whoever wants it says what it is. Equal ones are compiled once."""

    def text(self, isa: Isa) -> str:
        """LLVM IR, a function `run(jobs, number of jobs)`."""
        ...

    def __hash__(self) -> int: ...


def available() -> tuple[str, ...]:
    """Back-ends this machine can run, best first; `numpy` is always there."""
    return (*runnable(), NUMPY)


def chosen() -> str:
    """The back-end to use: the one KVTOOL_ENTROPY_CODER names, else the best there is.

    Raises
    ------
    UsageError : the variable names a back-end that does not exist, or that this machine cannot run.
    """
    name = asked(VARIABLE)
    if not name:
        return best_isa() or NUMPY
    if name not in available():
        raise UsageError(f"{VARIABLE}={name}: no such entropy coder here", f"one of {', '.join(available())}, or unset")
    return name


def compile_ahead(dtype: str) -> None:
    """Compile what decodes to numbers of this format, before anybody waits for it."""
    for kind in (dtype, "int16"):  # as it is, and what a finer level refines
        kernel(kind)


def isa() -> Isa | None:
    """The instruction set of the back-end to use; None: there is no machine code. Raises as `chosen`."""
    return ISAS.get(chosen())


def kernel(kind: str | Kind) -> Function | None:
    """`function(jobs, number of jobs)` for one of KINDS, compiled at its first use; None: numpy's reference serves.

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
            if asked(VARIABLE):
                raise UsageError(f"{VARIABLE}={name}: it cannot be compiled: {error}", "unset it") from error
            _warn_slow(str(error))
            return None


@cache
def _kernel(name: str, kind: str | Kind) -> Function:
    """Compile; callers hold the lock, so no kernel is compiled twice."""
    return compiled(_text(ISAS[name], kind), ISAS[name], "run")[0]


def _text(isa: Isa, kind: str | Kind) -> str:
    if not isinstance(kind, str):
        return kind.text(isa)
    if kind in _OF_NUMBERS:
        return _OF_NUMBERS[kind](isa)
    if kind in (ENCODE, ENCODE_CONTEXTS):
        return encode_module(isa, kind == ENCODE_CONTEXTS)
    return decode_module(isa, kind)


@cache
def _warn_slow(reason: str) -> None:
    """Say once that decoding takes ten times as long, and why."""
    warnings.warn(f"the entropy coder runs in numpy: {reason}", RuntimeWarning, stacklevel=2)
