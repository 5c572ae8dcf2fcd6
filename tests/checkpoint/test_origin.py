"""A folder converted from a GGUF file is held against what was made: damage is told, never computed with."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from kvtool.core.checkpoint import fingerprint
from kvtool.core.checkpoint.files import PACKED, SOURCE, ModelFiles
from kvtool.core.checkpoint.fingerprint import lacks_digests, model_fingerprint, read_origin
from kvtool.core.checkpoint.gguf import convert
from kvtool.core.checkpoint.gguf.convert import converted
from kvtool.core.errors import ModelError
from tests.checkpoint.gguf_files import write_gguf

KINDS = {"": "Q8_0"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A GGUF file, and a cache with the folder made of it."""
    place = tmp_path_factory.mktemp("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVTOOL_CACHE", str(place / "cache"))
        source = write_gguf(place / "tiny.gguf", kinds=KINDS)
        converted(source)
    return source, place / "cache"


@pytest.fixture
def source(made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fingerprint, "_RACY_SECONDS", 0.0)
    monkeypatch.setenv("KVTOOL_CACHE", str(shutil.copytree(made[1], tmp_path / "cache")))
    monkeypatch.setattr(convert, "_convert", None)  # converting again would fail
    return made[0]


def of(source: Path) -> str:
    return model_fingerprint(ModelFiles(str(source), converted(source), "gguf"), "float32")


def overwrite(path: Path, size: int = 200) -> None:
    """Other numbers under the same header, name and length."""
    with path.open("r+b") as file:
        file.seek(-size, 2)
        file.write(b"\xff" * size)


def as_before_digests(folder: Path) -> None:
    noted = json.loads((folder / SOURCE).read_text())
    del noted["files"]
    (folder / SOURCE).write_text(json.dumps(noted))


def test_a_conversion_notes_the_digest_of_each_file(source: Path) -> None:
    folder = converted(source)
    noted = json.loads((folder / SOURCE).read_text())["files"]
    assert noted.keys() == {path.name for path in folder.iterdir()} - {SOURCE}
    assert {PACKED, "model.safetensors", "config.json", "tokenizer.json"} <= noted.keys()
    assert noted[PACKED] == hashlib.sha256((folder / PACKED).read_bytes()).hexdigest()


def test_the_fingerprint_is_the_gguf_files_alone(source: Path) -> None:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    identity = f'{{"conversion":1,"dtype":"float32","gguf":"{digest}","version":1}}'
    assert of(source) == hashlib.sha256(identity.encode()).hexdigest()


@pytest.mark.parametrize("name", [PACKED, "model.safetensors", "tokenizer.json", "config.json"])
def test_damage_is_told(source: Path, name: str) -> None:
    of(source)
    overwrite(converted(source) / name)
    with pytest.raises(ModelError, match=f"damaged: {name} is not what was made") as caught:
        of(source)
    assert "delete that folder" in caught.value.hint


def test_a_file_that_is_gone_or_was_put_there(source: Path) -> None:
    folder = converted(source)
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(ModelError, match=r"adapter_config\.json is not what was made"):
        of(source)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is not what was made"):
        of(source)


def test_a_start_hashes_nothing_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = of(source)
    monkeypatch.setattr(fingerprint.hashlib, "file_digest", None)  # hashing again would fail
    assert of(source) == first


def test_a_folder_of_before_is_completed_once(source: Path) -> None:
    folder, first = converted(source), of(source)
    noted = read_origin(folder)
    as_before_digests(folder)
    assert lacks_digests(folder)
    assert of(source) == first
    assert read_origin(folder) == noted
    overwrite(folder / PACKED)
    with pytest.raises(ModelError, match="damaged"):
        of(source)


def test_packed_weights_made_anew_are_noted_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted(source)
    (folder / PACKED).unlink()
    monkeypatch.setattr(convert, "_pack", lambda *_: None)
    assert of(source)  # no room for them, say: the model runs without
    monkeypatch.undo()

    def other(folder: Path, *_: object) -> None:
        (folder / PACKED).write_bytes(b"of another release")

    monkeypatch.setenv("KVTOOL_CACHE", str(folder.parent.parent))
    monkeypatch.setattr("kvtool.core.checkpoint.packed.pack_folder", other)
    assert of(source)
    assert read_origin(folder).files[PACKED] == hashlib.sha256(b"of another release").hexdigest()


def test_a_folder_that_cannot_be_written_to_is_used_as_it_is(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_before_digests(converted(source))

    def refuse(*_: object) -> None:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr("kvtool.core.checkpoint.fingerprint.write_atomically", refuse)
    assert of(source)
    assert lacks_digests(converted(source))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sha256": "0", "version": "x"}', '{"files": 3}', "\x00\xff"])
def test_a_note_that_cannot_be_read(source: Path, text: str) -> None:
    folder = converted(source)
    (folder / SOURCE).write_text(text)
    with pytest.raises(ModelError, match=f"{SOURCE} cannot be read"):
        of(source)
