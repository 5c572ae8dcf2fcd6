"""Processes for Triton, which settles at its import whether it interprets: any other test may have imported it."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

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
