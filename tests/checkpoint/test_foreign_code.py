"""A model's folder brings data, never code: nothing in it is run, and nobody is asked whether it may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.checkpoint.hub import resolve
from kvtool.core.errors import ModelError
from kvtool.core.retrieval.embed import Embedder
from tests.cli.working import kvtool
from tests.families import edit_config
from tests.wording import refused

EVIL = {"AutoConfig": "evil.Any", "AutoModelForCausalLM": "evil.Any", "AutoModel": "evil.Any"}


@pytest.fixture(autouse=True)
def code(folder: Path) -> None:
    """Add code to the model's folder that leaves a file when it is run."""
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Any: pass\n")


def ingest(folder: Path, *form: str) -> Any:
    """Ingest a document with a folder's model, and say yes to all questions."""
    document = folder.with_name("mill.txt")
    document.write_text("The mill stands on the river.")
    args = ("--store", folder.with_name("store"), "--model", folder, *form)
    return kvtool("ingest", document, *args, stdin=b"y\ny\ny\n")


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["human", "json"])
def test_a_yes_on_stdin_runs_no_code_of_a_models_folder(form: tuple[str, ...], folder: Path) -> None:
    edit_config(folder, auto_map=EVIL, model_type="evil")
    done = ingest(folder, *form).failed(12, "needs code from its own folder")
    assert "[y/N]" not in done.out + done.err
    assert not (folder / "ran").exists()


def test_a_yes_on_stdin_runs_no_code_of_a_tokenizer(folder: Path) -> None:
    """Without tokenizer.json, the way of `AutoTokenizer`."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    settings = {"tokenizer_class": "Any", "auto_map": {"AutoTokenizer": ["evil.Any", "evil.Any"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ingest(folder)
    assert not (folder / "ran").exists()


@pytest.mark.slow
def test_an_embedding_model_with_code_of_its_own_is_refused(folder: Path) -> None:
    edit_config(folder, auto_map=EVIL, model_type="evil")
    with refused(ModelError):
        Embedder(str(folder)).encode(["x"])
    assert not (folder / "ran").exists()


def test_an_embedding_models_part_in_pickle_is_refused(folder: Path) -> None:
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"weights that can run code")
    with refused(ModelError, numbers=True):
        Embedder(str(folder))


def test_a_config_that_names_a_kernel_of_a_hub_fetches_none(folder: Path) -> None:
    from kvtool.core.checkpoint.load import load_model

    edit_config(folder, attn_implementation="somebody/kernel", _attn_implementation="somebody/kernel")
    assert load_model(resolve(str(folder)), device="cpu").model.config._attn_implementation == "sdpa"


def test_an_adapter_beside_the_weights_is_refused_by_name(folder: Path) -> None:
    """The fingerprint does not count it: with and without it a store would hold another model's KV under one name."""
    (folder / "adapter_config.json").write_text("{}")
    ingest(folder).failed(12, "adapter_config.json")
