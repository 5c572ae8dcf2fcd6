"""A model's fingerprint: the same wherever it lies, another after any change that matters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtool.core.errors import ModelError
from kvtool.core.model import digests
from kvtool.core.model.digests import file_digest
from kvtool.core.model.files import ModelFiles
from kvtool.core.model.fingerprint import model_fingerprint
from kvtool.core.places import cache_dir
from tests.families import edit_config, save_tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def of(folder: Path, dtype: str = "float32") -> str:
    return model_fingerprint(ModelFiles(str(folder), folder, "folder"), dtype)


def age(path: Path) -> None:
    os.utime(path, (1_000_000_000, 1_000_000_000))


def test_moved_folder_is_the_same_model(saved: Path, folder: Path) -> None:
    assert of(saved) == of(folder)
    assert len(of(folder)) == 64


def test_dtype_is_part_of_it(folder: Path) -> None:
    assert of(folder, "float32") != of(folder, "bfloat16")


def test_volatile_settings_are_not(folder: Path) -> None:
    before = of(folder)
    edit_config(folder, _name_or_path="/elsewhere", transformers_version="9", dtype="float16", use_cache=False)
    assert of(folder) == before


@pytest.mark.parametrize(
    "change", [{"rms_norm_eps": 1e-5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}]
)
def test_settings_that_shape_a_kv_are(folder: Path, change: dict[str, object]) -> None:
    before = of(folder)
    edit_config(folder, **change)
    assert of(folder) != before


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_one_changed_byte(folder: Path, name: str) -> None:
    before = of(folder)
    data = bytearray((folder / name).read_bytes())
    data[-3] ^= 1
    (folder / name).write_bytes(data)
    assert of(folder) != before


def test_files_beside_it_do_not_matter(folder: Path) -> None:
    before = of(folder)
    (folder / "README.md").write_text("x")
    assert of(folder) == before


def test_digest_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    age(path)
    first = file_digest(path)
    monkeypatch.setattr(digests.hashlib, "file_digest", None)  # hashing again would fail
    assert file_digest(path) == first


def test_changed_file_is_hashed_again(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    age(path)
    first = file_digest(path)
    path.write_bytes(b"abd")
    assert file_digest(path) != first


def test_a_file_written_this_moment_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    file_digest(path)
    assert not (cache_dir() / "digests.json").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a": [1]}', "\x00\xff"])
def test_damaged_table_is_no_trouble(tmp_path: Path, text: str) -> None:
    cache_dir().mkdir(parents=True)
    (cache_dir() / "digests.json").write_text(text)
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    age(path)
    assert file_digest(path) == file_digest(path)
    assert str(path) in json.loads((cache_dir() / "digests.json").read_text())


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    age(tmp_path / "file")
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "file" / "below"))
    assert file_digest(tmp_path / "file").startswith("ba7816bf")


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}" for i in range(8)]
    for path in paths:
        path.write_bytes(path.name.encode())
        age(path)
    threads = [threading.Thread(target=file_digest, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(json.loads((cache_dir() / "digests.json").read_text())) == {str(path) for path in paths}


def test_damaged_conversion(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="damaged"):
        model_fingerprint(ModelFiles("x.gguf", tmp_path, "gguf"), "float32")


def test_no_torch(folder: Path) -> None:
    """A second `ingest` of an unchanged corpus asks only for this, and must not wait for torch."""
    code = f"""
import sys
from kvtool.core.model import files, fingerprint, load, packaged, prompt, tokens
model = files.resolve({str(folder)!r})
device = load.resolve_device("cpu")
fingerprint.model_fingerprint(model, load.resolve_dtype("auto", device, model))
try:
    packaged.find_packaged()
except Exception:
    pass
assert "torch" not in sys.modules and "transformers" not in sys.modules
tokenizer = load.load_tokenizer(model)
prompt.question_tokens(tokenizer, "Who?", prompt.prompt_parts(tokenizer))
tokens.count_tokens(tokenizer)(["a", "b"])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": "."})
