"""`--dtype int8`: products with a GGUF file's weights in 8-bit integers, as an arithmetic of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvtool as package
from kvtool.core.cache.store import Store
from kvtool.core.common.machine import Arithmetic
from kvtool.core.kernels.linear import modules
from kvtool.core.native.isa import best_isa, multiplies_int8
from tests.checkpoint.gguf_files import write_gguf
from tests.cli.working import CHUNKS, QUESTION, SHORT, kvtool, write_corpus

INT8 = ("--dtype", "int8")
needs_int8 = pytest.mark.skipif(multiplies_int8(best_isa()) is None, reason="the CPU has no AVX2")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("int8") / "packed.gguf", kinds={"": "Q4_1"})


@pytest.fixture
def made(gguf: Path, tmp_path: Path) -> Path:
    at = ("--store", tmp_path / "store", "--model", gguf, *CHUNKS)
    done = kvtool("ingest", write_corpus(tmp_path / "in", documents=3), *at, *INT8, "--json").fine().json
    assert (done["resolved"]["dtype"], done["resolved"]["store_dtype"]) == ("int8", "bfloat16")
    return tmp_path / "store"


@needs_int8
def test_it_is_an_arithmetic_of_its_own(made: Path) -> None:
    """The laws hold in it, its records name it, and what they lose to float32 is measured at their first use."""
    with Store.open(made) as store:
        assert set(store.arithmetics()) == {Arithmetic("int8", "cpu")}
    own = kvtool("query", QUESTION, "--store", made, *INT8, *SHORT, "--json").fine().json
    other = kvtool("query", QUESTION, "--store", made, "--dtype", "float32", *SHORT, "--json").fine().json
    assert (own["resolved"]["dtype"], other["resolved"]["dtype"]) == ("int8", "float32")
    assert own["tokens"]["reused"] == other["tokens"]["reused"] > 0
    assert own["resolved"]["stepper"] == other["resolved"]["stepper"]  # tokens are generated in the same way
    gates = kvtool("inspect", "gate", "--store", made, *INT8, "--json").fine().json
    assert gates["passed"]


@needs_int8
def test_a_prompt_is_multiplied_so_and_a_checked_answer_is_fulls(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, multiply = list[int](), modules.int8_gemm

    def counted(matrix: Any, x: Any, *more: Any) -> Any:
        rows.append(len(x))
        return multiply(matrix, x, *more)

    monkeypatch.setattr(modules, "int8_gemm", counted)
    with package.open(made, dtype="int8") as cache:
        full = cache.query(QUESTION, fusion="full", max_tokens=12)
        assert max(rows) == full.tokens["prompt"]
        checked = cache.query(QUESTION, fusion="reuse", verify=True, max_tokens=12)
        assert (checked.generated.ids, checked.answer) == (full.generated.ids, full.answer)


def test_where_there_is_no_code_for_it(tiny: Path, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = ("--store", tmp_path / "none", *INT8)
    corpus = write_corpus(tmp_path / "in", documents=1)
    kvtool("ingest", corpus, "--model", tiny, *at).failed(2, "packed weights of a GGUF file")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    kvtool("ingest", corpus, "--model", gguf, *at).failed(2, "needs a CPU with AVX2 or, on ARM, dot products")


@needs_int8
def test_weights_without_a_product_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 bits, which AVX2 cannot add up: not silently computed otherwise."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    gguf = write_gguf(tmp_path / "eight.gguf", kinds={"": "Q8_0"})
    at = ("--store", tmp_path / "none", "--model", gguf, *INT8)
    kvtool("ingest", write_corpus(tmp_path / "in", documents=1), *at).failed(2, "no products for the weights")
