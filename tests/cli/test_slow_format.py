"""A store made where bfloat16 is fast is used where it is not: in float32, its records as they are."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtool.core.cache.store import Store
from kvtool.core.model.options import ModelOptions
from kvtool.core.session.session import Session
from tests.cli.working import CHUNKS, QUESTION, SHORT, kvtool, listing, write_corpus
from tests.families import save_tiny

FAST, PLAIN = "avx2 avx512_bf16", "avx2"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", dtype="bfloat16")


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "KVTOOL_DTYPE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def elsewhere(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store in bfloat16, on a machine that is now a plain one."""
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", FAST)
    write_corpus(tmp_path / "corpus")
    kvtool("ingest", tmp_path / "corpus", "--store", tmp_path / "store", "--model", model, *CHUNKS).fine()
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", PLAIN)
    return tmp_path / "store"


def asked(store: Path, *more: object) -> dict[str, Any]:
    return kvtool("query", QUESTION, "--store", store, "--json", *SHORT, *more).fine().json


def test_it_is_read_in_float32(elsewhere: Path) -> None:
    with Store.open(elsewhere) as store:
        session = Session(store)
        assert session.identity.dtype == "bfloat16"
        decoder = session.decoder
        assert (decoder.dtype, decoder.kv_dtype) == (torch.float32, torch.bfloat16)
        assert decoder.loaded.fingerprint == session.identity.fingerprint
        literal = Session(store, ModelOptions(dtype="bfloat16"), warn=lambda text, hint: said.append(text + hint))
        said: list[str] = []
        assert literal.decoder.dtype == torch.bfloat16
    assert said == ["this CPU has no fast bfloat16 products, and float32 is many times as fastleave --dtype out"]


def test_answers_differ_by_rounding_only(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same chunks from the same records; nothing is computed anew but the question."""
    compared = kvtool("query", QUESTION, "--store", elsewhere, "--json", *SHORT, "--compare", "reuse,full").fine().json
    plain = asked(elsewhere, "--fusion", "reuse")
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", FAST)
    there = asked(elsewhere, "--fusion", "reuse")
    assert plain["tokens"] == there["tokens"]
    assert [chunk["id"] for chunk in plain["chunks"]] == [chunk["id"] for chunk in there["chunks"]]
    assert compared["runs"]


def test_it_grows_by_records_of_its_own_format(elsewhere: Path, model: Path, tmp_path: Path) -> None:
    before = len(listing(elsewhere))
    shutil.copytree(tmp_path / "corpus", tmp_path / "more")
    (tmp_path / "more" / "new.md").write_text("The windmill on the hill belongs to Ada Quillon.\n")
    kvtool("ingest", tmp_path / "more" / "new.md", "--store", elsewhere, "--model", model, *CHUNKS).fine()
    assert len(listing(elsewhere)) == before + 1
    assert kvtool("store", "verify", "--store", elsewhere, "--json").fine().json["damaged"] == []
    found = kvtool("query", "Who owns the windmill?", "--store", elsewhere, "--json", *SHORT, "--top-k", 1).fine().json
    assert found["chunks"][0]["status"] in ("hit", "exact")
    assert found["tokens"]["reused"] > 0


def test_it_is_compressed_there(elsewhere: Path) -> None:
    done = kvtool("compress", "--store", elsewhere, "--fit", "--fit-prompts", 2, "--questions", 2, "--json").fine()
    assert done.json["levels"][0]["chunks"] > 0
    asked(elsewhere, "--level", "2")


def test_the_gate_passes_there(elsewhere: Path) -> None:
    assert kvtool("inspect", "gate", "--store", elsewhere, "--json").fine().json["passed"] is True


def test_a_cpu_without_avx2_is_told_once_and_works(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", "sse4_2 avx")
    done = kvtool("query", QUESTION, "--store", elsewhere, *SHORT).fine()
    assert done.err.count("KVTOOL_CPU_FEATURES names no AVX2") == (platform.machine() in ("x86_64", "AMD64"))
    assert "AVX2" not in done.out
    assert "AVX2" not in kvtool("query", QUESTION, "--store", elsewhere, "--quiet", *SHORT).fine().err
    assert "AVX2" not in kvtool("store", "stats", "--store", elsewhere).fine().err
