"""Loading: devices, dtypes, errors, and the tokenizer: without transformers it is the one that transformers reads."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kvtool.core.checkpoint import load
from kvtool.core.checkpoint.files import ModelFiles
from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model, load_tokenizer, read_tokenizer, resolve_device, resolve_dtype
from kvtool.core.errors import KvtoolError, ModelError, UsageError
from kvtool.core.model.template import render
from kvtool.core.model.tokens import encode, encode_control
from tests.checkpoint.gguf_files import write_gguf
from tests.families import FAMILIES, HYBRIDS, edit_config, save_tiny, tiny_model, tiny_tokenizer
from tests.wording import refused


@pytest.fixture
def files(folder: Path) -> ModelFiles:
    return resolve(str(folder))


def refusal(files: ModelFiles) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load_model(files, device="cpu")
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in FAMILIES | HYBRIDS), ("llama-llama3", "bfloat16"), ("qwen2", "float16")],
)
def test_every_family_saved_and_loaded(name: str, dtype: str, tmp_path: Path) -> None:
    loaded = load_model(resolve(str(save_tiny(name, tmp_path, dtype=dtype))), device="cpu", dtype=dtype)
    ids, same = torch.arange(2, 90)[None], tiny_model(name, dtype)
    same.set_attn_implementation(loaded.model.config._attn_implementation)
    assert torch.equal(loaded.model(ids).logits, same(ids).logits)
    assert loaded.dtype == dtype
    assert loaded.model.dtype == getattr(torch, dtype)


def test_ready_to_run_and_silent(files: ModelFiles, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load_model(files, device="cpu")
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert (loaded.device, loaded.files) == ("cpu", files)
    assert len(loaded.fingerprint) == 64
    assert loaded.load_ms > 0
    assert capfd.readouterr() == ("", "")


def test_transformers_settings_are_put_back(files: ModelFiles) -> None:
    from transformers.utils import logging

    logging.set_verbosity_info()
    try:
        load_model(files, device="cpu")
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()


def test_unsupported_model_is_refused_before_its_weights(files: ModelFiles) -> None:
    edit_config(files.folder, rope_parameters={"rope_type": "mrope", "rope_theta": 1e4})
    (files.folder / "model.safetensors").write_bytes(b"")
    assert "in an unknown way (mrope)" in refusal(files).message


def test_missing_weights(files: ModelFiles) -> None:
    path = files.folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(files).message


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "nonsense"},
        {"model_type": None},
        {"hidden_size": "many"},
        {"intermediate_size": 96},  # not that of the weights
        {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"},
        {"num_attention_heads": 0},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ],
)
def test_odd_configuration(files: ModelFiles, changes: dict[str, Any]) -> None:
    edit_config(files.folder, **changes)
    refusal(files)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": 1}'])
def test_damaged_tokenizer(files: ModelFiles, text: str) -> None:
    (files.folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError):
        load_tokenizer(files)


def test_truncation_and_padding_of_the_file_are_switched_off(files: ModelFiles) -> None:
    backend = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(files.folder / "tokenizer.json"))
    assert len(encode(load_tokenizer(files), "The tide rises and falls twice a day")) > 8


def test_out_of_memory(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    full = RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: not enough memory")
    monkeypatch.setattr(load, "_plain_model", Mock(side_effect=full))
    with refused(KvtoolError) as caught:
        load_model(files, device="cpu")
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cpu:1", "cuda:99", "CUDA"])
def test_no_such_device(device: str) -> None:
    with pytest.raises(UsageError):
        resolve_device(device)


@pytest.mark.parametrize("dtype", ["", "int4", "float64", "FP32", "bf16", "8"])
def test_no_such_dtype(files: ModelFiles, dtype: str) -> None:
    with pytest.raises(UsageError):
        resolve_dtype(dtype, "cpu", files)


@pytest.mark.parametrize(
    ("stated", "native", "device", "meant"),
    [
        ({"dtype": "bfloat16"}, True, "cpu", "bfloat16"),
        ({"dtype": "bfloat16"}, False, "cpu", "float32"),
        ({"dtype": "float16"}, True, "cpu", "float32"),
        ({"dtype": "float32"}, True, "cpu", "float32"),
        ({"dtype": "float16"}, True, "mps", "float16"),
        ({"dtype": "torch.bfloat16"}, True, "cpu", "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, True, "mps", "float16"),  # the key's old name
    ],
)
def test_auto_dtype(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, stated: dict[str, Any], native: bool, device: str, meant: str
) -> None:
    edit_config(files.folder, **stated)
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", "avx2 avx512_bf16" if native else "avx2")
    assert resolve_dtype("auto", device, files) == meant


def test_auto_dtype_from_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_config(save_tiny("llama", tmp_path, dtype="bfloat16"), dtype=None)
    monkeypatch.setenv("KVTOOL_CPU_FEATURES", "avx512_bf16")
    assert resolve_dtype("auto", "cpu", resolve(str(tmp_path))) == "bfloat16"


def test_damaged_settings_of_a_gguf_file_are_made_again(tmp_path: Path) -> None:
    """The GGUF file is whole: to download it again would change nothing."""
    files = resolve(str(write_gguf(tmp_path / "x.gguf")))
    (files.folder / "tokenizer.json").write_text("{}")
    assert refusal(files).hint == f"delete {files.folder}; it is made again"


def test_two_threads_load_at_once(tmp_path: Path) -> None:
    """Loading sets torch's default dtype for the whole process, and restores what it found."""
    ids = torch.arange(5, 60)[None]
    expected = tiny_model("llama", "bfloat16")(ids).logits
    files, start = resolve(str(save_tiny("llama", tmp_path, dtype="bfloat16"))), threading.Barrier(4)

    def load(number: int) -> torch.Tensor:
        start.wait()
        model = load_model(files, device="cpu", dtype="bfloat16").model
        with torch.inference_mode():
            return model(ids).logits

    for _ in range(3):
        with ThreadPoolExecutor(4) as threads:
            assert all(torch.equal(found, expected) for found in threads.map(load, range(4)))
        assert torch.get_default_dtype() == torch.float32


TEXTS = ("The tide, 조수 1874", "<|user|>\nWho?</s>", " a  b\n\tc ", "", "e\u0301 👩‍👩‍👧 \u200b")
TURNS = [{"role": "user", "content": "Who built the mill?"}]


def saved(folder: Path, chat: bool = True, **settings: Any) -> Path:
    tiny_tokenizer(chat).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.parametrize("chat", [True, False])
def test_equals_that_of_transformers(chat: bool, tmp_path: Path) -> None:
    ours, theirs = read_tokenizer(saved(tmp_path, chat)), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours is not None
    for text in TEXTS:
        assert encode(ours, text) == encode(theirs, text)
        ids = encode_control(ours, text)
        assert ids == encode_control(theirs, text)
        for skips in (True, False):
            assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)
    for name in ("bos_token_id", "eos_token_id", "chat_template", "special_tokens_map"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    if chat:
        assert render(ours, [TURNS]) == render(theirs, [TURNS])


@pytest.mark.parametrize(
    "settings",
    [
        {"add_bos_token": False},
        {"pad_token": "<pad>"},
        {"additional_special_tokens": ["<image>"]},
        {"extra_special_tokens": {"image_token": "<image>"}},
        {"chat_template": [{"name": "default", "template": "x"}]},
        {"added_tokens_decoder": {"0": {"content": "<s>", "special": True, "lstrip": True}}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_left_to_transformers_where_it_would_change_something(settings: dict[str, Any], tmp_path: Path) -> None:
    assert read_tokenizer(saved(tmp_path, chat=False, **settings)) is None
