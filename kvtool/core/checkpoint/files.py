"""Files of a model's folder: their names, their headers, and checks of both. No torch."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.core.errors import ModelError

PACKAGED = "smollm2"
WAYS_OUT = f"give a local model folder, a FILE.gguf, or `{PACKAGED}` (the small packaged model that needs no model hub)"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
SOURCE = "gguf-source.json"  # in a folder converted from a GGUF file: which one
PACKED = "packed.safetensors"  # in such a folder: its weights as the GGUF file has them
DOWNLOAD, HASH, UNPACK = "model_download", "model_hash", "model_unpack"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".pickle", ".pkl")
_LFS = b"version https://git-lfs"
_MAX_HEADER = 100_000_000  # the safetensors format's own bound
_MAX_CONFIG = 50_000_000


Once = Callable[[str], AbstractContextManager[None]]
"""Entered with `DOWNLOAD`, `HASH` or `UNPACK` while that is done for a model's first use."""


def unnoticed(what: str) -> AbstractContextManager[None]:
    """Report nothing."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The place of a model's files.

    Attributes
    ----------
    ref : what the user gave; absolute for local paths, so that it means the same in every folder.
    folder : holds config.json, safetensors weights and a tokenizer.
    kind : "folder", "hub", "gguf" or "packaged".
    """

    ref: str
    folder: Path
    kind: str


def looks_local(ref: str) -> bool:
    """Return True if a reference is spelled like a path, so that a typo in it is not looked for on the hub."""
    return ref.startswith(("/", ".", "~")) or "\\" in ref or ref.count("/") > 1 or ref.lower().endswith(".gguf")


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be loaded, naming the reason.

    Raises
    ------
    ModelError : a part is missing, half-downloaded, a Git LFS pointer, or not safetensors; or it has an adapter.
    """
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"to use the GGUF file in it: --model {ggufs[0]}" if ggufs else WAYS_OUT
        raise ModelError(f"{folder} is not a model folder: it has no config.json", hint)
    read_config(folder)
    _refuse_adapter(folder)
    for weights in weight_files(folder):
        _check_safetensors(weights)
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise ModelError(
            f"{folder} has no tokenizer ({', '.join(_VOCABULARIES)})", "copy the model's tokenizer files beside it"
        )
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            _refuse_pointer(folder / name)


def _refuse_adapter(folder: Path) -> None:
    """Refuse an adapter: with `peft` installed, transformers would load it over the weights, and two models would have
    one fingerprint."""
    if os.path.lexists(folder / _ADAPTER):
        raise ModelError(
            f"{folder} has an adapter beside its weights ({_ADAPTER})",
            f"merge it into the model, or move {_ADAPTER} away to use the model without it",
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises ModelError."""
    path = folder / "config.json"
    _refuse_pointer(path)
    config = _read_json(path)
    if not isinstance(config, dict):
        raise ModelError(f"{path} does not hold a model's settings", "download the model again")
    return config


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files that `transformers` would read, sorted by name.

    Raises
    ------
    ModelError : there are none, or shards that the index lists are missing.
    """
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        raise _no_weights(folder)
    index = _read_json(folder / _INDEX)
    table = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise ModelError(f"{folder / _INDEX} lists no weight files", "download the model again")
    shards = sorted(set(table.values()))
    strange = [name for name in shards if Path(name).name != name or "\0" in name]
    if strange:
        raise ModelError(f"{folder / _INDEX} names a file outside its folder: {strange[0]!r}", WAYS_OUT)
    with reading(folder / _INDEX):  # a name may be longer than the system takes
        missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} is incomplete: {len(missing)} of {len(shards)} weight files are missing, first {missing[0]}",
            "finish the download and run again",
        )
    return [folder / name for name in shards]


def _no_weights(folder: Path) -> ModelError:
    names = [path.name for path in folder.iterdir() if path.is_file()]
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        return ModelError(
            f"{folder} has its weights only as {pickles[0]}, which can run code when opened",
            "kvtool reads safetensors only; convert it or use a model published as safetensors",
        )
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if others:
        return ModelError(
            f"{folder} holds {others[0]} but neither {_WEIGHTS} nor {_INDEX}",
            "an adapter needs merging into its model first; a single weight file must be called " + _WEIGHTS,
        )
    return ModelError(f"{folder} is a model folder without weights", f"put {_WEIGHTS} beside config.json")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a ModelError that names the file."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", "check the path and its permissions") from error


def _refuse_pointer(path: Path) -> None:
    with reading(path), path.open("rb") as file:
        start = file.read(len(_LFS))
    if start == _LFS:
        raise ModelError(
            f"{path} is a Git LFS pointer, not the file itself", f"run `git lfs pull` in {path.parent}, then again"
        )


def _read_json(path: Path) -> Any:
    try:
        with reading(path):
            if path.stat().st_size > _MAX_CONFIG:
                raise ModelError(f"{path} is too large to be what its name says", "download the model again")
            return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}", "download the model again") from error


def tensor_table(path: Path) -> dict[str, Any]:
    """Read the header of a safetensors file: name → dtype, shape, data_offsets.

    Raises
    ------
    ModelError : cut short, or not safetensors.
    """
    size = path.stat().st_size
    try:
        with reading(path), path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _MAX_HEADER):
                raise ValueError("its header runs past its end")
            table = json.loads(file.read(length))
        end = max((entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__"), default=0)
        if not all(_is_tensor(entry) for name, entry in table.items() if name != "__metadata__"):
            raise ValueError("a tensor without a dtype, a shape or a place")
        if 8 + length + end > size:
            raise ValueError(f"{8 + length + end} bytes are announced, {size} are there")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ModelError(f"{path} is not a whole safetensors file: {error}", "download it again") from error
    return {name: entry for name, entry in table.items() if name != "__metadata__"}


def _is_tensor(entry: dict[str, Any]) -> bool:
    numbers = [*entry["shape"], *entry["data_offsets"]]
    return isinstance(entry["dtype"], str) and all(type(number) is int and number >= 0 for number in numbers)


def _check_safetensors(path: Path) -> None:
    _refuse_pointer(path)
    if not tensor_table(path):
        raise ModelError(f"{path} holds no tensors", "download it again")
