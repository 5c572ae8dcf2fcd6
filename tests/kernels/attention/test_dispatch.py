"""Choice of the backend for a call of attention, and why each one before it declines."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from kvtool.core.common.machine import ATTENTION
from kvtool.core.errors import UsageError
from kvtool.core.kernels.attention import flash_cpu
from kvtool.core.kernels.attention.dispatch import BACKENDS, explain
from kvtool.core.kernels.attention.flash_ir import Tiling
from kvtool.core.kernels.attention.params import AttentionCall
from kvtool.core.kernels.attention.sdpa import LONG_PREFILL
from kvtool.core.native.isa import AVX2, AVX512, AVX512_BF16
from kvtool.core.native.jit import has_triton
from tests.wording import refused

NAMES = [backend.name for backend in BACKENDS]
CALL = AttentionCall("cpu", torch.float32)


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTENTION, raising=False)


def has(monkeypatch: pytest.MonkeyPatch, *, tiles: bool = False, able: str = "AVX512", features: str = "") -> None:
    """Another CPU, as far as a backend is chosen by it."""
    there = ("avx512", "avx2", "scalar") if able == "AVX512" else ("avx2", "scalar")
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: tiles)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", able.lower())
    monkeypatch.setattr("kvtool.core.native.isa.runnable", lambda: there)
    monkeypatch.setattr(flash_cpu, "kernel", lambda tiling: tiling)
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", f"avx2 fma {features}")


def serves(call: AttentionCall = CALL, **change: Any) -> str:
    return explain(call._replace(**change)).serves.name


def test_the_backend_follows_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, features="avx512f avx512_bf16")
    assert [serves(dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)] == [
        "flash",
        "flash",
        "eager",
    ]
    assert flash_cpu.tiling_here(torch.bfloat16) == Tiling(AVX512_BF16, "bfloat16", pairs=True)
    assert flash_cpu.tiling_here(torch.float32) == Tiling(AVX512, "float32")
    has(monkeypatch, tiles=True, features="avx512f avx512_bf16 amx_bf16")
    assert serves(dtype=torch.bfloat16) == "sdpa"  # with tiles
    assert serves() == "flash"
    has(monkeypatch, features="avx512f")
    assert flash_cpu.tiling_here(torch.bfloat16) == Tiling(AVX512, "bfloat16")
    has(monkeypatch, able="AVX2", features="avx512f avx512_bf16")  # torch is held back, so are we
    assert flash_cpu.tiling_here(torch.bfloat16) == Tiling(AVX2, "bfloat16")
    has(monkeypatch, able="DEFAULT")
    assert flash_cpu.tiling_here(torch.float32) is None
    assert serves() == "eager"


def test_the_backend_follows_the_rows_and_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch)
    assert serves(rows=1) == "sdpa"
    assert serves(rows=1, softcap=True) == serves(rows=1, packed=True) == "flash"
    assert serves(key_dim=60, value_dim=60) == serves(gradient=True) == serves(heads=242) == "eager"
    assert serves(rows=1024, causal=True, batch=2) == "sdpa"
    assert serves(causal=True, value_dim=32, batch=2) == serves(window=9, batch=2) == serves(rows=1, batch=2) == "eager"
    has(monkeypatch, able="DEFAULT")
    assert serves(window=100) == "sdpa"
    assert serves(window=100, softcap=True) == serves(window=100, sinks=True) == "eager"
    long = CALL._replace(rows=LONG_PREFILL, keys=LONG_PREFILL)
    assert serves(long, causal=True) == "sdpa"
    assert serves(long) == serves(long, causal=True, value_dim=32) == "eager"
    assert serves(device="mps") == "sdpa"


@pytest.fixture(params=[True, False], ids=["triton", "no triton"])
def triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    spec = importlib.util.find_spec
    there = object() if request.param else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: there if name == "triton" else spec(name))
    return bool(request.param)


def test_the_backend_of_a_gpu(triton: bool) -> None:
    assert has_triton() is triton
    ours = "triton" if triton else "sdpa"
    for change in ({}, {"rows": 1}, {"window": 9}, {"causal": True, "keys": 64}, {"rows": 1, "on_device": True}):
        assert serves(device="cuda", **change) == ours
    assert serves(device="cuda", softcap=True) == ("triton" if triton else "eager")
    assert serves(device="cuda", key_dim=576, value_dim=512) == "sdpa"  # latents
    assert serves(device="cuda", causal=True, batch=2) == "sdpa"
    assert serves(device="cuda", window=9, batch=2) == "eager"


def test_a_backend_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, tiles=True)
    for name in NAMES[1:]:
        monkeypatch.setenv(ATTENTION, name)
        assert serves(dtype=torch.bfloat16) == name
    for name, device in (("triton", "cpu"), ("flash", "cuda")):
        monkeypatch.setenv(ATTENTION, name)
        with refused(UsageError):
            serves(device=device)
    has(monkeypatch, able="DEFAULT")
    monkeypatch.setenv(ATTENTION, "flash")
    with refused(UsageError):
        serves()
    monkeypatch.setenv(ATTENTION, "sdpa")
    assert serves(softcap=True) == "eager"  # what it cannot do is passed on to the next


def test_an_explanation_names_everybody_before(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, able="DEFAULT")
    found = explain(CALL)
    assert [name for name, _ in found.declined] == NAMES[: NAMES.index(found.serves.name)]
    assert all(reason for _, reason in found.declined)
    assert "flash: there is no machine code for float32 on this CPU" in str(found)
    monkeypatch.setenv(ATTENTION, "eager")
    assert {reason for _, reason in explain(CALL).declined} == {f"{ATTENTION}=eager"}
