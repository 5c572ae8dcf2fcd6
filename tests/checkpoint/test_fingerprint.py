"""A model's fingerprint: the same in every folder, another after any change that matters."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtool.core.checkpoint import files
from kvtool.core.checkpoint.files import ModelFiles, file_digest
from kvtool.core.checkpoint.hub import model_fingerprint
from kvtool.core.common.files import cache_dir
from tests.families import edit_config


def of(folder: Path, dtype: str = "float32") -> str:
    return model_fingerprint(ModelFiles(str(folder), folder, "folder"), dtype)


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock can be set back for the time at which a file was changed last."""
    monkeypatch.setattr(files, "_RACY_SECONDS", 0.0)


def age(path: Path) -> None:
    os.utime(path, (1_000_000_000, 1_000_000_000))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    age(path)
    return path


def test_moved_folder_is_the_same_model(saved: Path, folder: Path) -> None:
    (folder / "README.md").write_text("not part of it")
    assert of(saved) == of(folder)
    assert len(of(folder)) == 64


def test_dtype_is_part_of_it(folder: Path) -> None:
    assert of(folder, "float32") != of(folder, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "are_volatile"),
    [
        ({"_name_or_path": "/elsewhere", "transformers_version": "9", "dtype": "float16", "use_cache": False}, True),
        ({"rms_norm_eps": 1e-5}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, False),
    ],
)
def test_settings_that_shape_a_kv_are(folder: Path, changes: dict[str, object], are_volatile: bool) -> None:
    before = of(folder)
    edit_config(folder, **changes)
    assert (of(folder) == before) == are_volatile


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_one_changed_byte(folder: Path, name: str) -> None:
    before = of(folder)
    data = bytearray((folder / name).read_bytes())
    data[-3] ^= 1
    (folder / name).write_bytes(data)
    assert of(folder) != before


def test_digest_is_remembered(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = file_digest(weights)
    monkeypatch.setattr(files.hashlib, "file_digest", None)  # hashing again would fail
    assert file_digest(weights) == first


@pytest.mark.parametrize("written_as", ["weights", "new"])
def test_other_weights_of_equal_size_and_time(written_as: str, weights: Path) -> None:
    """As `rsync -t` and `tar` leave them: in place, or renamed."""
    first = file_digest(weights)
    time.sleep(0.02)  # the kernel's clock for files ticks every few milliseconds
    weights.with_name(written_as).write_bytes(b"abd")
    weights.with_name(written_as).rename(weights)
    age(weights)
    assert file_digest(weights) != first


def later(seconds: float) -> None:
    """As if the digests had been made so long ago."""
    table = cache_dir() / "digests.json"
    entries = json.loads(table.read_text())
    for entry in entries.values():
        entry["checked"] -= seconds
    table.write_text(json.dumps(entries))


def test_a_part_of_the_weights_is_read_again_every_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only their bytes differ, as after a disk image was restored."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(4_000_000))
    first = file_digest(path)
    stamp = files._stamp(path)
    monkeypatch.setattr(files, "_stamp", lambda path: stamp)
    path.write_bytes(bytes(2_000_000) + bytes([1]) * 2_000_000)
    assert file_digest(path) == first
    later(90_000)
    second = file_digest(path)
    assert second == hashlib.sha256(path.read_bytes()).hexdigest()
    later(90_000)
    monkeypatch.setattr(files.hashlib, "file_digest", None)  # hashing all of it again would fail
    assert file_digest(path) == second
    monkeypatch.setattr(files, "_sample", None)  # and today not even a part is read again
    assert file_digest(path) == second


def test_a_file_written_this_moment_is_not_remembered(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_RACY_SECONDS", 2.0)
    weights.touch()
    file_digest(weights)
    assert not (cache_dir() / "digests.json").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a": [1]}', "\x00\xff"])
def test_damaged_table_is_no_trouble(weights: Path, text: str) -> None:
    cache_dir().mkdir(parents=True)
    (cache_dir() / "digests.json").write_text(text)
    assert file_digest(weights) == file_digest(weights) == hashlib.sha256(b"abc").hexdigest()
    assert str(weights) in json.loads((cache_dir() / "digests.json").read_text())


def test_cache_that_cannot_be_written(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CACHE", str(weights / "below"))
    assert file_digest(weights).startswith("ba7816bf")


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}" for i in range(8)]
    for path in paths:
        path.write_bytes(path.name.encode())
        age(path)
    with ThreadPoolExecutor(len(paths)) as threads:
        [*threads.map(file_digest, paths)]
    assert set(json.loads((cache_dir() / "digests.json").read_text())) == {str(path) for path in paths}


def test_no_torch(folder: Path) -> None:
    """A second `ingest` of an unchanged corpus asks only for this, and must not wait for torch."""
    code = f"""
import sys
from kvtool.core.checkpoint import hub, load
from kvtool.core.model import prompt, tokens
model = hub.resolve({str(folder)!r})
device = load.resolve_device("cpu")
hub.model_fingerprint(model, load.resolve_dtype("auto", device, model))
try:
    hub.find_packaged()
except Exception:
    pass
assert "torch" not in sys.modules and "transformers" not in sys.modules
tokenizer = load.load_tokenizer(model)
prompt.question_tokens(tokenizer, "Who?", prompt.prompt_parts(tokenizer))
tokens.count_tokens(tokenizer)(["a", "b"])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": "."})
