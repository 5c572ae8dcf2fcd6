"""Models that are built without transformers: bit for bit those that transformers builds, for every listed family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtool.core.checkpoint import load
from kvtool.core.checkpoint.architecture import FAMILIES, Family, UnlistedArchitecture, read_architecture
from kvtool.core.checkpoint.dense import DenseModel
from kvtool.core.checkpoint.files import read_config
from kvtool.core.checkpoint.hub import resolve
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.hf import check
from tests import families
from tests.checkpoint.gguf_files import written
from tests.checkpoint.gguf_models import IN_GGUF
from tests.families import edit_config, save_tiny

IDS = list(range(5, 45))
LISTED = [
    *("llama", "llama-linear", "llama-llama3", "mistral", "mistral-window", "ministral", "qwen2", "qwen3", "phi3"),
    *("smollm3", "seed-oss", "olmo2", "gemma", "gemma2", "gemma3", "granite"),
]
LISTED_IN_GGUF = ("llama", "llama-linear", "llama-llama3", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")


def decoder_of(path: Path, dtype: str) -> Decoder:
    return Decoder(load.load_model(resolve(str(path)), device="cpu", dtype=dtype, packed=True))


def assert_same(path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = decoder_of(path, dtype)
    assert isinstance(ours.model, DenseModel)
    monkeypatch.setattr(load, "_dense_model", lambda *args: None)
    theirs = decoder_of(path, dtype)
    assert not isinstance(theirs.model, DenseModel)
    assert ours.forward.why == theirs.forward.why == ""
    (logits, cache), (expected, other) = ours.prefill(IDS), theirs.prefill(IDS)
    assert torch.equal(logits, expected)
    assert ours.kinds == theirs.kinds
    for buffer, reference in zip(cache.buffers, other.buffers, strict=True):
        assert all(torch.equal(*sides) for sides in zip(buffer.view(), reference.view(), strict=True))


def test_every_listed_family_is_compared() -> None:
    assert {str(families.FAMILIES[name]().model_type) for name in LISTED} == set(FAMILIES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LISTED)
def test_folder(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(save_tiny(name, tmp_path, dtype="bfloat16"), dtype, monkeypatch)


@pytest.mark.parametrize("name", LISTED_IN_GGUF)
def test_gguf(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "x.gguf", IN_GGUF[name])
    assert_same(tmp_path / "x.gguf", "float32", monkeypatch)


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_self_check_passes_and_is_remembered(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache"))
    decoder = decoder_of(save_tiny(name, tmp_path / "model", dtype="bfloat16"), "float32")
    assert check.why_not_served(decoder) == ""
    monkeypatch.setattr(check, "check_forward", None)
    assert check.why_not_served(decoder) == ""


@pytest.mark.parametrize("changes", [{"adds_one": True}, {"scales_embeddings": True}, {"windows": "all"}])
def test_self_check_finds_a_wrong_row_of_the_table(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache"))
    folder = save_tiny("llama", tmp_path / "model", dtype="bfloat16")
    edit_config(folder, sliding_window=3)
    monkeypatch.setitem(FAMILIES, "llama", Family(**changes))
    assert "differs by" in check.why_not_served(decoder_of(folder, "float32"))


UNLISTED = [
    {"model_type": "mixtral"},
    {"attn_temperature_tuning": True},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "attention_factor": 2.0}},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    {"num_hidden_layers": 10**9},
    {"num_attention_heads": 0},
    {"hidden_act": "relu"},
    {"hidden_size": None},
    {"quantization_config": {"bits": 4}},
]


@pytest.mark.parametrize("changes", UNLISTED, ids=str)
def test_unlisted_settings_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    config = read_config(save_tiny("llama", tmp_path, tokenizer=False))
    assert len(read_architecture(config).windows) == 4
    with pytest.raises(UnlistedArchitecture):
        read_architecture(config | changes)


OTHER_WEIGHTS: dict[str, dict[str, torch.Tensor | None]] = {  # None: without it
    "more": {"model.layers.1.self_attn.gate.weight": torch.ones(4, 4)},
    "fewer": {"model.layers.1.input_layernorm.weight": None},
    "no head": {"lm_head.weight": None},  # which would be the embedding if it were tied
    "bias": {"model.norm.bias": torch.ones(64)},
    "shape": {"model.layers.1.mlp.up_proj.weight": torch.ones(128, 63)},
    "tied": {},
}


@pytest.mark.parametrize("change", OTHER_WEIGHTS)
def test_transformers_decides_about_other_weights(change: str, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    weights = load_file(folder / "model.safetensors") | OTHER_WEIGHTS[change]
    save_file({name: weight for name, weight in weights.items() if weight is not None}, folder / "model.safetensors")
    if change == "tied":
        edit_config(folder, tie_word_embeddings=True)
    assert load._dense_model(resolve(str(folder)), "float32", stays=True, int8=False) is None
