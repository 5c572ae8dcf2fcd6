"""Fingerprints of models: equal wherever the files are stored, another one when anything changes that shapes a KV.

They are made of SHA-256 digests of files, which are remembered between runs. A folder converted from a GGUF file has
the fingerprint of that file, and notes the digest of each file that was made: the KV of a damaged model would otherwise
be stored, and found again, under the fingerprint of the undamaged one. No torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvtool.core.checkpoint.files import (
    HASH,
    SOURCE,
    TOKENIZER_FILES,
    ModelFiles,
    Once,
    read_config,
    reading,
    unnoticed,
    weight_files,
)
from kvtool.core.common.places import cache_dir
from kvtool.core.common.private import make_folder
from kvtool.core.errors import KvtoolError, ModelError

_VERSION = 1
_SETTINGS = ("config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json")
_REMEMBERED = 4096  # entries kept, the newest
_RACY_SECONDS = 2.0  # a file younger than this may change again under the same times
_LOCK_SECONDS = 5.0
_DAY_SECONDS = 86400.0
_TAKES_SECONDS = 1 << 28  # bytes of a file from which on its digest does
_BLOCKS, _BLOCK = 32, 1 << 15  # 1 MiB of a file, spread over it, first and last bytes included
# Keys of config.json that change no key or value: by whom and where the file was saved, and how it is to be run.
_VOLATILE = frozenset(
    {
        "_name_or_path",
        "_model_name_or_path",
        "name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_experts_implementation",
        "_commit_hash",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    }
)


def model_fingerprint(files: ModelFiles, dtype: str, once: Once = unnoticed) -> str:
    """Return the SHA-256 (hex) over configuration, weights, tokenizer and the format that keys and values are kept in.

    The arithmetic that computes them is no part of it: machines of different arithmetic share a store.

    Parameters
    ----------
    dtype : of the keys and values, resolved ("bfloat16", "float32", "float16"), never "auto".
    once : entered while a file of the model is hashed for the first time.

    Raises
    ------
    ModelError : the folder is incomplete; or it was converted from a GGUF file, and is not what was made.
    """
    contents = _converted(files.folder) if files.kind in ("gguf", "packaged") else _contents(files.folder, once)
    identity = {"version": _VERSION, **contents, "dtype": dtype}
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _contents(folder: Path, once: Once) -> dict[str, Any]:
    return {
        "config": _lasting(read_config(folder)),
        "weights": {path.name: file_digest(path, once) for path in weight_files(folder)},
        "tokenizer": {name: file_digest(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()},
    }


def _converted(folder: Path) -> dict[str, Any]:
    """Identify a converted model by its GGUF file's digest, whichever release of a library converted it.

    Raises
    ------
    ModelError : a file is another one than was made, is missing, or was put there later.
    """
    origin, found = read_origin(folder), _digests(folder)
    wrong = {name for name in origin.files.keys() | found.keys() if found.get(name) != origin.files.get(name)}
    if wrong:
        raise _damaged(folder, f"{min(wrong)} is not what was made")
    return {"gguf": origin.sha256, "conversion": origin.version}


def _lasting(value: Any) -> Any:
    """Return the configuration without its volatile keys, at every depth."""
    if isinstance(value, dict):
        return {key: _lasting(inner) for key, inner in value.items() if key not in _VOLATILE}
    if isinstance(value, list):
        return [_lasting(inner) for inner in value]
    return value


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a converted folder.

    Attributes
    ----------
    name : of the GGUF file.
    sha256 : of the GGUF file (hex).
    version : of the conversion.
    files : name → SHA-256 (hex) of what was made.
    """

    name: str
    sha256: str
    version: int
    files: Mapping[str, str]


def read_origin(folder: Path) -> Origin:
    """Read the note of a converted folder. Raises ModelError: it is damaged."""
    try:
        noted = json.loads((folder / SOURCE).read_text(encoding="utf-8"))
        files = {str(name): str(digest) for name, digest in noted.get("files", {}).items()}
        return Origin(str(noted.get("name", "")), str(noted["sha256"]), int(noted["version"]), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(folder, f"{SOURCE} cannot be read") from error


def note_origin(folder: Path, gguf: Path, version: int) -> None:
    """Note the GGUF file of a converted folder, and the digests of its files as they are now. Raises OSError."""
    origin = Origin(gguf.name, file_digest(gguf), version, _digests(folder))
    _write_atomically(folder / SOURCE, json.dumps(asdict(origin)).encode())


def _digests(folder: Path) -> dict[str, str]:
    """Return the digests of the files that shape what the model computes, or how a text becomes its tokens."""
    found = {}
    for path in sorted({folder / name for name in (*_SETTINGS, *TOKENIZER_FILES)} | {*folder.glob("*.safetensors")}):
        if path.is_file():
            with reading(path):
                found[path.name] = file_digest(path)
    return found


def _damaged(folder: Path, what: str) -> ModelError:
    return ModelError(
        f"the converted model in {folder} is damaged: {what}",
        "delete that folder; it is made again from the GGUF file",
    )


@dataclass(frozen=True, slots=True)
class _Known:
    """The remembered digest of a file.

    Attributes
    ----------
    stamp : device, inode, size, mtime_ns, ctime_ns. Copies may keep size and mtime (`rsync -t`, `tar`); a restored disk
        image may keep all of it.
    digest : SHA-256 of all of it (hex).
    sample : SHA-256 of a part of it (hex).
    checked : seconds since 1970 when one of them was last computed.
    """

    stamp: tuple[int, ...]
    digest: str
    sample: str
    checked: float

    @property
    def is_fresh(self) -> bool:
        return 0 <= time.time() - self.checked < _DAY_SECONDS


def file_digest(path: Path, once: Once = unnoticed) -> str:
    """Return the SHA-256 (hex) of a file's bytes, computed once for as long as the file stays the same.

    On the first use in a day a part of the file is read again and compared: a file with the same path and times need
    not be the same file. `once` is entered while a large file is hashed.
    """
    real = path.resolve()
    stamp = _stamp(real)
    known = _remembered().get(str(real))
    if known is not None and known.stamp == stamp:
        if known.is_fresh:
            return known.digest
        if _sample(real) == known.sample:
            _remember(str(real), replace(known, checked=time.time()))
            return known.digest
    with once(HASH) if stamp[2] >= _TAKES_SECONDS else contextlib.nullcontext(), real.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    sample = _sample(real)
    if _stamp(real) == stamp and time.time() - max(stamp[-2:]) / 1e9 > _RACY_SECONDS:
        _remember(str(real), _Known(stamp, digest, sample, time.time()))
    return digest


def _stamp(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _sample(path: Path) -> str:
    """Return the SHA-256 of blocks spread evenly over a file; of all of a small one."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        last = max(0, os.fstat(file.fileno()).st_size - _BLOCK)
        for start in sorted({last * block // (_BLOCKS - 1) for block in range(_BLOCKS)}):
            file.seek(start)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _table() -> Path:
    return cache_dir() / "digests.json"


def _remembered() -> dict[str, _Known]:
    """Read the table on disk; a table that cannot be read counts as empty, and entries that cannot be are left out."""
    try:
        table = json.loads(_table().read_text(encoding="utf-8"))
        return {path: known for path, entry in table.items() if (known := _parsed(entry))}
    except (OSError, ValueError, RecursionError, AttributeError, KvtoolError):
        return {}


def _parsed(entry: Any) -> _Known | None:
    try:
        return _Known(
            tuple(map(int, entry["stamp"])), str(entry["digest"]), str(entry["sample"]), float(entry["checked"])
        )
    except (TypeError, KeyError, ValueError, OverflowError):
        return None


def _remember(path: str, entry: _Known) -> None:
    """Add one entry to the table; one that cannot be written (no home, read-only, lock held) only costs time."""
    with contextlib.suppress(OSError, Timeout, KvtoolError):
        make_folder(_table().parent)
        with FileLock(f"{_table()}.lock", timeout=_LOCK_SECONDS, mode=0o600):
            table = _remembered()
            table.pop(path, None)
            table[path] = entry
            newest = {path: asdict(known) for path, known in list(table.items())[-_REMEMBERED:]}
            _write_atomically(_table(), json.dumps(newest).encode())


def _write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees the old bytes or the new ones, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
