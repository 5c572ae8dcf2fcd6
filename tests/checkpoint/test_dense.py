"""Models that are built without transformers: bit for bit those that transformers builds, for every listed family."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtool.core.checkpoint import load
from kvtool.core.checkpoint.architecture import FAMILIES, UnlistedArchitecture, read_architecture
from kvtool.core.checkpoint.dense import DenseModel
from kvtool.core.checkpoint.files import read_config
from kvtool.core.checkpoint.hub import resolve
from kvtool.core.model.decoder import Decoder
from tests import families
from tests.checkpoint.gguf_files import write_gguf
from tests.checkpoint.gguf_models import IN_GGUF
from tests.checkpoint.gguf_writing import written
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
    assert ours.passes.why == theirs.passes.why == ""
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
