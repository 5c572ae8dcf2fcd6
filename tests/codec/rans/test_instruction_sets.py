"""The choice of an instruction set, and the encoder's division."""

from __future__ import annotations

import functools
import importlib
import platform
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvtool.core.codec.rans import kernels_ir
from kvtool.core.codec.rans.kernels_ir import Decode
from kvtool.core.errors import KvtoolError
from kvtool.core.native import isa as isas
from kvtool.core.native import jit
from kvtool.core.native.builder import FunctionBuilder, module
from kvtool.core.native.isa import Isa
from kvtool.core.native.jit import JOBS
from tests.wording import refused


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """What is found out once in a process is found out anew, here and after."""
    caches = isas.runnable, isas.llvm
    yield
    for found in caches:
        found.cache_clear()


X86, ARM = "x86_64", "aarch64"


def test_a_set_needs_all_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        @staticmethod
        def get_host_cpu_features() -> dict[str, bool]:
            return {name: name != "avx512vbmi2" and name != "bmi2" for name in isas.ISAS["avx512"].features}

    isas.runnable.cache_clear()
    monkeypatch.setattr(platform, "machine", lambda: X86)
    monkeypatch.setattr(isas, "llvm", Old)
    assert isas.runnable() == ("scalar",)


@pytest.mark.parametrize(
    ("machine", "told", "names"),
    [
        (X86, "sse4_2 avx avx2 fma bmi2", ("avx2", "scalar")),
        (X86, "sse4_2", ("scalar",)),
        (X86, "avx avx2 avx512f avx512_vbmi2", ("avx2", "scalar")),
        (X86, "", ("avx512", "avx2", "scalar")),
        (ARM, "", ("neon", "scalar")),
        (ARM, "fp asimd asimddp", ("neon", "scalar")),
        (ARM, "fp", ("scalar",)),
    ],
)
def test_a_cpu_that_is_told_to_have_less_gets_less(
    machine: str, told: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class New:
        @staticmethod
        def get_host_cpu_features() -> dict[str, bool]:
            return dict.fromkeys(isas.ISAS["avx512"].features, True) if machine == X86 else {"crc": True}

    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(isas, "llvm", New)
    isas.runnable.cache_clear()
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", told)
    assert isas.runnable() == names


@pytest.mark.parametrize(
    ("held", "there", "best"),
    [
        ("", ("avx512", "avx2", "scalar"), "avx512"),
        ("avx2", ("avx512", "avx2", "scalar"), "avx2"),
        ("default", ("avx512", "avx2", "scalar"), "scalar"),
        ("default", ("neon", "scalar"), "neon"),  # which torch's default kernels on ARM use as well
    ],
)
def test_torch_is_held_back_and_so_are_we(
    held: str, there: tuple[str, ...], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isas, "runnable", functools.cache(lambda: there))
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", held)
    assert str(isas.best_isa()) == best


def test_a_missing_llvmlite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    isas.runnable.cache_clear()
    isas.llvm.cache_clear()
    monkeypatch.setattr(importlib, "import_module", Mock(side_effect=ImportError))
    with refused(KvtoolError):
        jit.kernel(Decode())


def next_states(isa: Isa) -> Any:
    """The encoder's division over arrays: states, frequencies, cumulatives and results, each u32."""
    k = FunctionBuilder("run", isa, JOBS)
    parts = [k.args.jobs.at(index).of("i32*").load() for index in range(4)]
    with k.loop(k.args.number) as step:
        loaded = [part.load(step * isa.width, isa.width) for part in parts[:3]]
        parts[3].store(kernels_ir.next_state(*loaded), step * isa.width)
    (function,) = jit.compiled(module(k), isa, "run")

    def run(states: Any, frequencies: Any, cumulative: Any) -> Any:
        results = np.empty_like(states)
        arrays = (states, frequencies, cumulative, results)
        function(np.array([array.ctypes.data for array in arrays]).ctypes.data, len(states) // isa.width)
        return results

    return run


@pytest.mark.parametrize("name", [name for name in isas.runnable() if name != "scalar"])
def test_the_division_is_exact(name: str) -> None:
    run, random = next_states(isas.ISAS[name]), np.random.default_rng(0)
    for frequency in range(1, 2049):
        quotients = np.concatenate(
            [
                np.arange(32, 48),
                np.arange(2**21 - 48, 2**21),
                *(2**bit + np.arange(-2, 3) for bit in range(6, 21)),
                random.integers(32, 2**21, 165),
            ]
        )
        near = quotients[:, None] * frequency + np.array([-1, 0, 1, frequency // 2, frequency - 1])
        states = near.reshape(-1)
        states = states[(states >= 32 * frequency) & (states < frequency << 21)]
        states = states[: len(states) // 16 * 16]
        cumulative = random.integers(0, 2049 - frequency, len(states))
        expected = (states // frequency << 11) + states % frequency + cumulative
        frequencies = np.full(len(states), frequency, np.uint32)
        found = run(states.astype(np.uint32), frequencies, cumulative.astype(np.uint32))
        assert np.array_equal(found, expected.astype(np.uint32))
