"""Compute dtype is separate from storage dtype: a store made where bfloat16 is fast works where it is not, and back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtool.core.cache.store import Store
from kvtool.core.model.options import ModelOptions
from kvtool.core.model.prefill import ChunkKV
from kvtool.core.session import gate
from kvtool.core.session.session import Session
from tests.cli.working import CHUNKS, PREFIX, QUESTION, SHORT, kvtool, listing, process, write_corpus
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
    write_corpus(tmp_path / "corpus", parts=2)
    kvtool("ingest", tmp_path / "corpus", "--store", tmp_path / "store", "--model", model, *CHUNKS).fine()
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", PLAIN)
    return tmp_path / "store"


def asked(store: Path, *more: object) -> dict[str, Any]:
    return kvtool("query", QUESTION, "--store", store, "--json", *SHORT, *more).fine().json


def test_it_is_read_in_float32(elsewhere: Path) -> None:
    session = Session.open(Store.open(elsewhere), ModelOptions())
    assert session.identity.dtype == "bfloat16"
    assert session.model.arithmetic == ("float32", "cpu")  # before the model is loaded
    decoder = session.decoder
    assert (decoder.dtype, decoder.kv_dtype) == (torch.float32, torch.bfloat16)
    assert session.model.arithmetic == ("float32", "cpu")
    assert decoder.loaded.fingerprint == session.identity.fingerprint
    session.store.close()


def test_who_names_a_slow_format_gets_it_and_is_told(elsewhere: Path) -> None:
    done = kvtool("query", QUESTION, "--store", elsewhere, "--dtype", "bfloat16", "--json", *SHORT).fine()
    assert "no fast bfloat16 products" in done.err
    assert done.json["resolved"]["dtype"] == "bfloat16"


@pytest.mark.some(2)
@pytest.mark.parametrize("features", [FAST, PLAIN])
@pytest.mark.parametrize(
    ("published", "kept"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16", "float16")]
)
def test_sixteen_bits_are_kept_whatever_computes(
    published: str, kept: str, features: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", features)
    own = save_tiny("llama", tmp_path / "model", dtype=published)
    write_corpus(tmp_path / "in", 1)
    kvtool("ingest", tmp_path / "in", "--store", tmp_path / "s", "--model", own, *CHUNKS, *PREFIX).fine()
    with Store.open(tmp_path / "s") as store:
        records = [store.read_kv(chunk, "raw", 0) for chunk in store.chunk_ids()]
        assert {record[0].dtype for record in records if record} == {kept}
    computed = "bfloat16" if (published, features) == ("bfloat16", FAST) else "float32"
    shown = kvtool("inspect", "--store", tmp_path / "s", "--json").fine().json
    assert shown["dtype"] == kept
    assert shown["computed_by"] == [{"dtype": computed, "device": "cpu", "chunks": shown["chunks"]}]
    assert f"{shown['chunks']} in {computed} on cpu" in kvtool("inspect", "--store", tmp_path / "s").fine().out


def test_both_machines_make_the_same_chunks(
    elsewhere: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kvtool("ingest", tmp_path / "corpus", "--store", tmp_path / "here", "--model", model, *CHUNKS).fine()
    assert listing(tmp_path / "here") == listing(elsewhere)
    again = kvtool("ingest", tmp_path / "corpus", "--store", elsewhere, "--model", model, "--json").fine().json
    assert again["chunks"] == {"computed": 0, "reused": 0, "removed": 0}
    assert again["documents"]["unchanged"] > 0


def test_another_format_is_refused(elsewhere: Path, tmp_path: Path) -> None:
    done = kvtool("ingest", tmp_path / "corpus", "--store", elsewhere, "--store-dtype", "float32")
    done.failed(2, "the store keeps bfloat16, not float32")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["push", "pack"])
def test_what_one_machine_gave_answers_on_the_other(elsewhere: Path, model: Path, tmp_path: Path, way: str) -> None:
    """Another process, of another arithmetic: nothing is computed but the question, in what that machine is fast in."""
    there = ("--store", tmp_path / "there")
    if way == "push":
        kvtool("store", "push", f"file://{tmp_path}/tier", "--store", elsewhere).fine()
        kvtool("store", "pull", f"file://{tmp_path}/tier", *there).fine()
    else:
        kvtool("store", "export", tmp_path / "pack.kvt", "--store", elsewhere).fine()
        kvtool("store", "import", tmp_path / "pack.kvt", *there).fine()
    ask = ("query", QUESTION, *there, "--fusion", "reuse", "--json", *SHORT)
    found = process(*ask, KVTOOL_CPU_FEATURES=PLAIN).fine().json
    assert found["resolved"] | {"dtype": "float32", "store_dtype": "bfloat16"} == found["resolved"]
    assert {chunk["status"] for chunk in found["chunks"]} == {"hit"}
    assert found["tokens"]["recomputed"] == 0
    verdict = kvtool("inspect", "gate", *there, "--json").fine().json
    (check,) = [check for check in verdict["checks"] if check["law"] == 6]
    assert (check["name"], check["arithmetic"]) == ("records made in bfloat16 on cpu", "float32 on cpu")
    assert 0 < check["difference"] <= check["tolerance"]
    assert 0 < verdict["loss_by_arithmetic"]["bfloat16 on cpu"] < 0.01
    assert "bfloat16 on cpu" in kvtool("inspect", "gate", *there).fine().out
    assert "records made in bfloat16 on cpu lose" in kvtool("doctor", *there).out


@pytest.mark.slow
def test_records_that_are_not_what_they_say_are_refused(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as another arithmetic can be distinguished from another text's KV."""
    read = gate.read_chunk

    def swapped(*args: Any, **more: Any) -> ChunkKV:
        kv = read(*args, **more)
        return ChunkKV([side.flip(1) for side in kv.keys], [side.flip(1) for side in kv.values])

    monkeypatch.setattr(gate, "read_chunk", swapped)
    kvtool("query", QUESTION, "--store", elsewhere, *SHORT).failed(12, "law 6 (records made in bfloat16 on cpu)")
    kvtool("query", QUESTION, "--store", elsewhere, "--fusion", "full", *SHORT).fine()


def test_one_machine_alone_has_nothing_to_compare(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", FAST)
    asked(elsewhere)
    verdict = kvtool("inspect", "gate", "--store", elsewhere, "--json").fine().json
    assert {check["law"] for check in verdict["checks"]} == {1, 3, 4, 7}
    assert "loss_by_arithmetic" not in verdict


@pytest.mark.slow
def test_parts_of_several_machines_are_merged_and_it_is_told(
    elsewhere: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, everything = tmp_path / "corpus", ("--store", tmp_path / "all")
    for part, features in (("1/2", FAST), ("2/2", PLAIN)):
        monkeypatch.setenv("KVTOOL_CPU_FEATURES", features)
        kvtool("ingest", corpus, "--store", tmp_path / part[0], "--shard", part, "--model", model, *CHUNKS).fine()
    merged = kvtool("store", "import", tmp_path / "1", tmp_path / "2", *everything, "--mine", "--json").fine()
    assert {row["dtype"] for row in merged.json["computed_by"]} == {"bfloat16", "float32"}
    assert "in float32 on cpu" in merged.err
    assert listing(tmp_path / "all") == listing(elsewhere)
    kvtool(
        "ingest", corpus / "mill1.md", "--store", tmp_path / "32", "--model", model, *CHUNKS, "--store-dtype", "float32"
    ).fine()
    refused = kvtool("store", "import", tmp_path / "32", "--store", elsewhere)
    refused.failed(12, "made with another dtype", "into a store of its own: --store")


def test_what_leaves_the_range_of_the_stores_format_is_refused(model: Path, tmp_path: Path) -> None:
    """float16 ends at 65504; bfloat16 has float32's range."""
    large = Path(shutil.copytree(model, tmp_path / "large"))
    weights = load_file(large / "model.safetensors")
    weights |= {name: one * 1e7 for name, one in weights.items() if "layers.1" in name and "v_proj" in name}
    save_file(weights, large / "model.safetensors", metadata={"format": "pt"})
    write_corpus(tmp_path / "in", 1)
    ingest = ("ingest", tmp_path / "in", "--model", large, *CHUNKS, *PREFIX, "--dtype", "float32", "--store-dtype")
    kvtool(*ingest, "float16", "--store", tmp_path / "narrow").failed(12, "the range of float16", "bfloat16")
    kvtool(*ingest, "bfloat16", "--store", tmp_path / "store").fine()
