"""Findings of the fuzzer and its like, one test for each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.cache import layout
from kvtool.core.cache.store import Store
from kvtool.core.checkpoint.hub import resolve
from kvtool.core.checkpoint.load import load_model, supported_config
from kvtool.core.errors import DamagedError, ModelError, UsageError
from kvtool.core.options.resolve import PROJECT_FILE
from kvtool.core.options.resolve import resolve as settings
from kvtool.core.query.reply import read_batch
from tests.families import edit_config, save_tiny
from tests.stores import make_store
from tests.wording import refused

DEEP = b"[" * 100_000


def test_questions_that_are_nested_too_deep(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(DEEP)
    with refused(UsageError, numbers=True):
        read_batch(path)


@pytest.mark.parametrize("text", [DEEP[:3000], b'{"format": Infinity, "uuid": "0b5c1e1a-0000-4000-8000-000000000000"}'])
def test_a_store_file_of_strange_json(tmp_path: Path, text: bytes) -> None:
    (tmp_path / layout.STORE_FILE).write_bytes(text)
    with pytest.raises(DamagedError):
        layout.read_uuid(tmp_path)


def test_a_manifest_that_is_no_object(tmp_path: Path) -> None:
    value: Any = [1]
    with Store.open(make_store(tmp_path / "store")) as store:
        with store.writer() as writer:
            writer.set_manifest(value)
        with refused(DamagedError):
            store.manifest()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")
@pytest.mark.parametrize("kind", ["fifo", "device", "large"])
def test_a_settings_file_that_is_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / PROJECT_FILE
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"#" * (2**20 + 1))
    with refused(UsageError):
        settings([], environ={"KVTOOL_HOME": str(tmp_path)}, folder=tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -1},
        {"vocab_size": 2**40},
        {"intermediate_size": 2**40},
        {"num_hidden_layers": 30, "intermediate_size": 3000},
    ],
)
def test_a_configuration_of_a_larger_model_than_its_weights(tmp_path: Path, changes: dict[str, int]) -> None:
    """It is refused before a model of that size is laid out."""
    folder = save_tiny("llama", tmp_path / "model")
    edit_config(folder, **changes)
    files = resolve(str(folder))
    with pytest.raises(ModelError) as caught:
        load_model(files, device="cpu")
    assert caught.value.exit_code == 12
    if max(changes.values()) > 10**6:
        with refused(ModelError):
            supported_config(files)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_settings_that_are_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / PROJECT_FILE).write_bytes(b"top_k = " + DEEP[:5000])
    with pytest.raises(UsageError):
        settings([], environ={"KVTOOL_HOME": str(tmp_path)}, folder=tmp_path)
