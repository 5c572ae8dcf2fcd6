"""The number format that a CPU multiplies fast, and variables that choose how: an unknown value is reported first."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from kvtool.core.common import machine
from kvtool.core.common.machine import (
    ALLOWED,
    SWITCHES,
    asked,
    cpu_features,
    is_fast,
    lacks_avx2,
    product_dtype,
    why_float32,
)
from kvtool.core.errors import UsageError
from kvtool.core.kernels.attention.dispatch import BACKENDS
from kvtool.core.options.resolve import RESERVED_ENV
from tests.cli.working import kvtool
from tests.wording import refused


@pytest.fixture(autouse=True)
def _free(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("features", "fast"),
    [
        ("fpu avx2 fma", False),
        ("avx2 avx512f avx512bw avx512vl", False),
        ("avx2 avx512_bf16", True),
        ("avx2 amx_bf16", True),
        ("avx2 amx-bf16", True),
        ("fp asimd bf16", True),
        ("fp asimd i8mm", False),
    ],
)
def test_bfloat16_by_features(monkeypatch: pytest.MonkeyPatch, features: str, fast: bool) -> None:
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", features)
    assert is_fast("bfloat16") is fast
    assert product_dtype("bfloat16") == ("bfloat16" if fast else "float32")
    assert fast or why_float32("bfloat16") == "this CPU has no fast bfloat16 products"
    assert is_fast("float32")
    assert not is_fast("float16")
    assert product_dtype("bfloat16", "cuda:1") == "bfloat16"
    assert product_dtype("float16", "mps") == "float16"


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
@pytest.mark.parametrize(("limit", "fast"), [("AVX2", False), ("avx512_core", False), ("AVX512_CORE_BF16", True)])
def test_what_onednn_may_use_counts(monkeypatch: pytest.MonkeyPatch, variable: str, limit: str, fast: bool) -> None:
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", "avx2 avx512_bf16")
    monkeypatch.setenv(variable, limit)
    assert is_fast("bfloat16") is fast
    assert fast or why_float32("bfloat16") == f"{variable} forbids bfloat16 products"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="a word about x86")
@pytest.mark.parametrize(("features", "lacks"), [("sse4_2 avx", True), ("avx avx2", False)])
def test_a_cpu_from_before_avx2(monkeypatch: pytest.MonkeyPatch, features: str, lacks: bool) -> None:
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", features)
    assert lacks_avx2() is lacks


@pytest.mark.parametrize("told", ["avx2 avx521f", "avx2,fma", "avx2 AVX_512"])
def test_what_no_cpu_has_is_refused(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", told)
    with refused(UsageError):
        cpu_features()


def test_all_that_this_cpu_has_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTOOL_CPU_FEATURES", raising=False)
    own = cpu_features()
    for told in ("", " ".join(own)):
        monkeypatch.setenv("KVTOOL_CPU_FEATURES", told)
        assert cpu_features() == own


def test_asking_imports_nothing() -> None:
    code = (
        "import sys\nfrom kvtool.core.common.machine import is_fast\nis_fast('bfloat16')\n"
        "assert not {'torch', 'numpy', 'llvmlite'} & set(sys.modules)"
    )
    if sys.platform == "linux":
        subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("variable", SWITCHES)
def test_what_is_allowed_is_taken_and_nothing_else(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", *ALLOWED[variable]):
        monkeypatch.setenv(variable, value)
        assert asked(variable) == value
    monkeypatch.setenv(variable, "nativ")
    with refused(UsageError):
        asked(variable)


def test_the_lists_are_those_of_who_follows_them() -> None:
    assert ALLOWED[machine.ATTENTION] == tuple(backend.name for backend in BACKENDS)
    assert {*SWITCHES} < {*RESERVED_ENV}


@pytest.mark.parametrize("variable", [*SWITCHES, "KVTOOL_CPU_FEATURES", "KVTOOL_DTYPE"])
@pytest.mark.parametrize("command", ["query Who?", "ingest .", "inspect sparsity Who?"])
def test_a_typo_is_said_first(variable: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "avx521")
    done = kvtool(*command.split(), "--store", "/nowhere").failed(2, variable, "avx521")
    assert done.err.count("hint: ") == 1
