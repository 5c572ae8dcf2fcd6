"""Files of foreign models: GGUF, safetensors, and the JSON files of a model folder."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvtool.core.checkpoint.files import check_folder, read_config
from kvtool.core.checkpoint.gguf.header import read_header
from kvtool.core.checkpoint.hub import model_fingerprint, resolve
from kvtool.core.checkpoint.load import load_model, load_tokenizer, resolve_dtype, supported_config
from kvtool.core.errors import EXIT_MISFIT, KvtoolError
from kvtool.core.model.prompt import prompt_parts
from kvtool.core.model.tokens import encode
from tests.checkpoint.gguf_files import write_gguf
from tests.families import save_tiny
from tests.fuzzing.registry import scratch

_TEXT = "The mill was built in 1804 <s> by the river, naïve 水車."


@functools.cache
def _sound() -> Path:
    return save_tiny("llama", scratch("models") / "sound", dtype="bfloat16")


@functools.cache
def _sharded() -> Path:
    folder = Path(shutil.copytree(_sound(), scratch("models") / "sharded"))
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(4)]
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@functools.cache
def _gguf() -> tuple[bytes, bytes]:
    """A file up to its tensors' numbers, and these."""
    path = write_gguf(scratch("models") / "sound.gguf")
    start = min(tensor.start for tensor in read_header(path).tensors.values())
    data = path.read_bytes()
    return data[:start], data[start:]


@functools.cache
def _weights() -> tuple[bytes, bytes]:
    """A safetensors file up to its numbers, and these."""
    data = (_sound() / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return data[:start], data[start:]


@contextlib.contextmanager
def _refused_as_a_model() -> Iterator[None]:
    """Nothing but a refusal of the model may come out: exit 12."""
    try:
        yield
    except KvtoolError as error:
        if error.exit_code != EXIT_MISFIT:
            raise AssertionError(f"exit {error.exit_code}: {error.message}") from error


def _with(name: str, data: bytes, folder: Path) -> Path:
    """A folder whose other files are links to the sound ones."""
    place = scratch("models") / f"with-{name}"
    if not place.is_dir():
        place.mkdir()
        for path in folder.iterdir():
            (place / path.name).symlink_to(path)
    (place / name).unlink(missing_ok=True)
    (place / name).write_bytes(data)
    return place


def gguf_header(data: bytes) -> None:
    path = scratch("models") / "header.gguf"
    path.write_bytes(data + _gguf()[1])
    with _refused_as_a_model():
        read_header(path)


def gguf_model(data: bytes) -> None:
    """Open a GGUF file, from its first use to a loaded model."""
    path = scratch("models") / "model.gguf"
    path.write_bytes(data + _gguf()[1])
    cache = scratch("models") / "cache"  # the run's own cache holds files of other tests
    try:
        with patch.dict(os.environ, KVTOOL_CACHE=str(cache)), _refused_as_a_model():
            load_model(resolve(str(path)), device="cpu", packed=True)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def safetensors(data: bytes) -> None:
    folder = _with("model.safetensors", data + _weights()[1], _sound())
    with _refused_as_a_model():
        files = resolve(str(folder))
        load_model(files, device="cpu", packed=True)


def safetensors_index(data: bytes) -> None:
    folder = _with("model.safetensors.index.json", data, _sharded())
    with _refused_as_a_model():
        check_folder(folder)


def config(data: bytes) -> None:
    folder = _with("config.json", data, _sound())
    with _refused_as_a_model():
        files = resolve(str(folder))
        read_config(folder)
        resolve_dtype("auto", "cpu", files)
        supported_config(files)
        model_fingerprint(files, "bfloat16")
        load_model(files, device="cpu", packed=True)


def _tokenizer_of(name: str) -> Callable[[bytes], None]:
    """Load a tokenizer one file of which is somebody else's, and make a prompt with it."""

    def target(data: bytes) -> None:
        with _refused_as_a_model():
            files = resolve(str(_with(name, data, _sound())))
            tokenizer = load_tokenizer(files)
            encode(tokenizer, _TEXT)
            prompt_parts(tokenizer, "Answer briefly.")

    return target


def generation_config(data: bytes) -> None:
    """Read generation_config.json, next to weights that are loaded in both ways."""
    folder = _with("generation_config.json", data, _sound())
    for packed in (False, True):
        with _refused_as_a_model():
            load_model(resolve(str(folder)), device="cpu", packed=packed)


def _file(name: str, folder: Callable[[], Path] = _sound) -> list[bytes]:
    return [(folder() / name).read_bytes()]


def _configs() -> list[bytes]:
    value: dict[str, Any] = json.loads(_file("config.json")[0])
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    others = ({"rope_parameters": yarn}, {"torch_dtype": "float16"}, {"quantization_config": {"quant_method": "fp8"}})
    return [json.dumps(value | other).encode() for other in ({}, *others)]


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "gguf_header": (gguf_header, lambda: [_gguf()[0]]),
    "gguf_model": (gguf_model, lambda: [_gguf()[0]]),
    "safetensors": (safetensors, lambda: [_weights()[0]]),
    "safetensors_index": (safetensors_index, lambda: _file("model.safetensors.index.json", _sharded)),
    "config": (config, _configs),
    **{
        file.partition(".")[0]: (_tokenizer_of(file), functools.partial(_file, file))
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    },
    "generation_config": (generation_config, lambda: _file("generation_config.json")),
}
