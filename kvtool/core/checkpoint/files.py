"""Files of a model's folder: their names, their headers, checks of both, and their SHA-256 digests. No torch.

Digests are remembered between runs. A folder made from a GGUF file notes that file's digest and those of what was made:
the KV of a damaged model would otherwise be stored, and found again, under the fingerprint of the undamaged one.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvtool.core.common.files import cache_dir, make_folder, replace_file
from kvtool.core.errors import KvtoolError, ModelError

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
SOURCE = "gguf-source.json"  # in a folder with the settings and tokenizer of a GGUF file: which one
DOWNLOAD, HASH, UNPACK = "model_download", "model_hash", "model_unpack"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".pickle", ".pkl")
_LFS = b"version https://git-lfs"
_MAX_HEADER = 100_000_000  # the safetensors format's own bound
_MAX_CONFIG = 50_000_000
_SETTINGS = ("config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json")
_TABLE = "digests.json"
_REMEMBERED = 4096  # entries kept, the newest
_RACY_SECONDS = 2.0  # a file younger than this may change again under the same times
_LOCK_SECONDS = 5.0
_DAY_SECONDS = 86400.0
_TAKES_SECONDS = 1 << 28  # bytes of a file from which on its digest does
_BLOCKS, _BLOCK = 32, 1 << 15  # 1 MiB of a file, spread over it, first and last bytes included


Once = Callable[[str], AbstractContextManager[None]]
"""Entered with `DOWNLOAD`, `HASH` or `UNPACK` while that is done for a model's first use."""


def unnoticed(what: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    ref: str  # what the user gave; absolute for local paths, so that it means the same in every folder
    folder: Path
    kind: str  # "folder", "hub", "gguf" or "packaged"
    gguf: Path | None = None  # the file of its weights, whose settings and tokenizer are in the folder


def looks_local(ref: str) -> bool:
    """Return True if a reference is spelled like a path, so that a typo in it is not looked for on the hub."""
    return ref.startswith(("/", ".", "~")) or "\\" in ref or ref.count("/") > 1 or ref.lower().endswith(".gguf")


def check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"to use the GGUF file in it: --model {ggufs[0]}" if ggufs else WAYS_OUT
        raise ModelError(f"{folder} is not a model folder: it has no config.json", hint)
    read_config(folder)
    # With `peft` installed, transformers would load it over the weights, and two models would have one fingerprint.
    if os.path.lexists(folder / _ADAPTER):
        raise ModelError(
            f"{folder} has an adapter next to its weights ({_ADAPTER})",
            f"merge it into the model, or move {_ADAPTER} away to use the model without it",
        )
    for weights in weight_files(folder):
        _refuse_pointer(weights)
        if not tensor_table(weights):
            raise ModelError(f"{weights} holds no tensors", "download it again")
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise ModelError(
            f"{folder} has no tokenizer ({', '.join(_VOCABULARIES)})", "copy the model's tokenizer files next to it"
        )
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            _refuse_pointer(folder / name)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    _refuse_pointer(path)
    config = _read_json(path)
    if not isinstance(config, dict):
        raise ModelError(f"{path} does not hold a model's settings", "download the model again")
    return config


def weight_files(folder: Path) -> list[Path]:
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
    return ModelError(f"{folder} is a model folder without weights", f"put {_WEIGHTS} next to config.json")


@contextmanager
def reading(path: Path) -> Iterator[None]:
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
    size = path.stat().st_size
    try:
        with reading(path), path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _MAX_HEADER):
                raise ValueError("its header runs past its end")
            table: dict[str, Any] = json.loads(file.read(length))
        table.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in table.values()), default=0)
        if not all(map(_is_tensor, table.values())):
            raise ValueError("a tensor without a dtype, a shape or a place")
        if 8 + length + end > size:
            raise ValueError(f"{8 + length + end} bytes are announced, {size} are there")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ModelError(f"{path} is not a whole safetensors file: {error}", "download it again") from error
    return table


def _is_tensor(entry: dict[str, Any]) -> bool:
    numbers = [*entry["shape"], *entry["data_offsets"]]
    return isinstance(entry["dtype"], str) and all(type(number) is int and number >= 0 for number in numbers)


@dataclass(frozen=True, slots=True)
class Origin:
    name: str
    sha256: str  # hex
    version: int  # of the conversion
    files: Mapping[str, str]  # name → SHA-256 (hex) of what was made


def read_origin(folder: Path) -> Origin:
    try:
        noted = json.loads((folder / SOURCE).read_text(encoding="utf-8"))
        files = {str(name): str(digest) for name, digest in noted.get("files", {}).items()}
        return Origin(str(noted.get("name", "")), str(noted["sha256"]), int(noted["version"]), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(folder, f"{SOURCE} cannot be read") from error


def note_origin(folder: Path, gguf: Path, version: int) -> None:
    origin = Origin(gguf.name, file_digest(gguf), version, _digests(folder))
    replace_file(folder / SOURCE, json.dumps(asdict(origin)).encode())


def gguf_contents(folder: Path, gguf: Path | None) -> dict[str, Any]:
    origin, found = read_origin(folder), _digests(folder)
    wrong = {name for name in origin.files.keys() | found.keys() if found.get(name) != origin.files.get(name)}
    if wrong:
        raise _damaged(folder, f"{min(wrong)} is not what was written")
    if gguf is not None and file_digest(gguf) != origin.sha256:
        raise ModelError(f"{gguf} has changed since the command began", "run it again")
    return {"gguf": origin.sha256, "conversion": origin.version}


def _digests(folder: Path) -> dict[str, str]:
    """Return the digests of the files that shape what the model computes, or how a text becomes its tokens."""
    found = {}
    named = {folder / name for name in (*_SETTINGS, *TOKENIZER_FILES)}
    for path in sorted(named | {*folder.glob("*.safetensors")}):
        if path.is_file():
            with reading(path):
                found[path.name] = file_digest(path)
    return found


def _damaged(folder: Path, what: str) -> ModelError:
    return ModelError(
        f"the model's settings in {folder} are damaged: {what}",
        "delete that folder; it is written again from the GGUF file",
    )


@dataclass(frozen=True, slots=True)
class _Known:
    """The remembered digest of a file, and of a part of it, SHA-256 in hex.

    Copies may keep size and mtime (`rsync -t`, `tar`); a restored disk image may keep the whole stamp.
    """

    stamp: tuple[int, ...]  # device, inode, size, mtime_ns, ctime_ns
    digest: str
    sample: str
    checked: float  # seconds since 1970 when one of them was last computed


def file_digest(path: Path, once: Once = unnoticed) -> str:
    """SHA-256 (hex) of a file's bytes, computed once for as long as the file stays the same.

    Once a day a part is read again and compared: path and times may be equal. `once` is entered for a large file.
    """
    real = path.resolve()
    stamp = _stamp(real)
    known = _remembered().get(str(real))
    if known is not None and known.stamp == stamp:
        if 0 <= time.time() - known.checked < _DAY_SECONDS:
            return known.digest
        if _sample(real) == known.sample:
            _remember(str(real), replace(known, checked=time.time()))
            return known.digest
    with once(HASH) if stamp[2] >= _TAKES_SECONDS else nullcontext(), real.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    sample = _sample(real)
    if _stamp(real) == stamp and time.time() - max(stamp[-2:]) / 1e9 > _RACY_SECONDS:
        _remember(str(real), _Known(stamp, digest, sample, time.time()))
    return digest


def _stamp(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _sample(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        last = max(0, os.fstat(file.fileno()).st_size - _BLOCK)
        for start in sorted({last * block // (_BLOCKS - 1) for block in range(_BLOCKS)}):
            file.seek(start)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _remembered() -> dict[str, _Known]:
    """Read the table on disk; one that cannot be read counts as empty."""
    try:
        table = json.loads((cache_dir() / _TABLE).read_text(encoding="utf-8"))
        return {
            path: _Known(
                tuple(map(int, entry["stamp"])), str(entry["digest"]), str(entry["sample"]), float(entry["checked"])
            )
            for path, entry in table.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, KvtoolError):
        return {}


def _remember(path: str, entry: _Known) -> None:
    """Add one entry to the table; one that cannot be written (no home, read-only, lock held) only costs time."""
    with suppress(OSError, Timeout, KvtoolError):
        file = cache_dir() / _TABLE
        make_folder(file.parent)
        with FileLock(f"{file}.lock", timeout=_LOCK_SECONDS, mode=0o600):
            table = _remembered()
            table.pop(path, None)
            table[path] = entry
            newest = {path: asdict(known) for path, known in list(table.items())[-_REMEMBERED:]}
            replace_file(file, json.dumps(newest).encode())
