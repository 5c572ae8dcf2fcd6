"""Processes for Triton, which settles at its import whether it interprets: any other test may have imported it."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install triton)"
)


def triton_process(folder: Path, interpret: str) -> ProcessPoolExecutor:
    """One process; `interpret`: `1` to run kernels on the CPU, `0` to compile them."""
    spawn = multiprocessing.get_context("spawn")
    settings = {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    return ProcessPoolExecutor(1, spawn, initializer=_begin, initargs=(settings,))


def _begin(settings: dict[str, str]) -> None:
    assert "triton" not in sys.modules
    os.environ.update(settings)


def compile_for_cuda(
    kernel: Any,
    capability: int,
    types: dict[str, str],
    constants: dict[str, Any],
    other: str = "",
    aligned: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Compile a kernel. `other`: the type of arguments that `types` does not name; `aligned`: beginnings of the types
    of arguments that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    place = kernel.arg_names.index
    signature = {name: "constexpr" if name in constants else types.get(name, other) for name in kernel.arg_names}
    values = {(place(name),): value for name, value in constants.items()}
    multiples = [name for name, kind in signature.items() if kind.startswith(aligned)]
    attributes = {(place(name),): [["tt.divisibility", 16]] for name in multiples}
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
