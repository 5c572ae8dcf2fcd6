"""The folder of a GGUF file is checked against what was written: damage is reported, never computed with."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvtool.core.checkpoint import files
from kvtool.core.checkpoint.files import SOURCE, ModelFiles
from kvtool.core.checkpoint.gguf import folder as gguf_folder
from kvtool.core.checkpoint.gguf.folder import prepare_folder
from kvtool.core.checkpoint.hub import model_fingerprint
from kvtool.core.errors import ModelError
from tests.checkpoint.gguf_files import write_gguf
from tests.wording import refused

KINDS = {"": "Q8_0"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A GGUF file, and a cache with the folder made of it."""
    place = tmp_path_factory.mktemp("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTOOL_CACHE", str(place / "cache"))
        source = write_gguf(place / "tiny.gguf", kinds=KINDS)
        prepare_folder(source)
    return source, place / "cache"


@pytest.fixture
def source(made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "_RACY_SECONDS", 0.0)
    monkeypatch.setenv("KVTOOL_CACHE", str(shutil.copytree(made[1], tmp_path / "cache")))
    monkeypatch.setattr(gguf_folder, "_write_files", None)  # writing it again would fail
    return made[0]


def of(source: Path) -> str:
    return model_fingerprint(ModelFiles(str(source), prepare_folder(source), "gguf", source), "float32")


def note(folder: Path) -> dict[str, Any]:
    noted: dict[str, Any] = json.loads((folder / SOURCE).read_text())
    return noted


def test_the_fingerprint_is_the_gguf_files_alone(source: Path) -> None:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    identity = f'{{"conversion":1,"dtype":"float32","gguf":"{digest}","version":1}}'
    assert of(source) == hashlib.sha256(identity.encode()).hexdigest()


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_damage_is_told(source: Path, name: str) -> None:
    of(source)
    path = prepare_folder(source) / name
    path.write_bytes(path.read_bytes()[:-200] + b"\xff" * 200)
    with refused(ModelError):
        of(source)


def test_a_file_that_is_gone_or_was_put_there(source: Path) -> None:
    folder = prepare_folder(source)
    (folder / "config.json").rename(folder / "adapter_config.json")
    with refused(ModelError):
        of(source)
    (folder / "adapter_config.json").unlink()
    with refused(ModelError):
        of(source)


def test_a_start_hashes_nothing_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = of(source)
    monkeypatch.setattr(files.hashlib, "file_digest", None)  # hashing again would fail
    assert of(source) == first


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["all digests", "its note"])
def test_a_folder_that_is_not_whole_is_made_anew(source: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    folder, first = prepare_folder(source), of(source)
    noted = note(folder)
    del noted["files"]
    (folder / SOURCE).write_text(json.dumps(noted))
    if lost == "its note":
        (folder / SOURCE).unlink()
    with refused(ModelError):  # `_write_files` is gone
        prepare_folder(source)
    monkeypatch.undo()
    monkeypatch.setenv("KVTOOL_CACHE", str(folder.parent.parent))
    assert of(source) == first
    assert note(folder)["files"].keys() | {SOURCE} == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sha256": "0", "version": "x"}', '{"files": 3}', "\x00\xff"])
def test_a_note_that_cannot_be_read(source: Path, text: str) -> None:
    folder = prepare_folder(source)
    (folder / SOURCE).write_text(text)
    with refused(ModelError):
        of(source)
