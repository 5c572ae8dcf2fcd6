"""What a folder converted from a GGUF file says of itself: which file it is of, and the digest of each file made.

A converted model is identified by its GGUF file, so nothing else would tell that its own numbers are others by now: the
KV of a damaged model would be stored, and found again, under the whole one's fingerprint. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kvtool.core.errors import ModelError
from kvtool.core.model.digests import file_digest, write_atomically
from kvtool.core.model.files import PACKED, SOURCE, TOKENIZER_FILES, reading

_SETTINGS = ("config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a converted folder is from.

    Attributes
    ----------
    name : of the GGUF file.
    sha256 : the GGUF file's (hex).
    version : of the conversion.
    files : name → SHA-256 (hex) of what was made; {}: made by a release that noted none.
    """

    name: str
    sha256: str
    version: int
    files: Mapping[str, str]


def read_origin(folder: Path) -> Origin:
    """Raises ModelError: what the folder says of itself cannot be read."""
    try:
        noted = json.loads((folder / SOURCE).read_text(encoding="utf-8"))
        files = {str(name): str(digest) for name, digest in noted.get("files", {}).items()}
        return Origin(str(noted.get("name", "")), str(noted["sha256"]), int(noted["version"]), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(folder, f"{SOURCE} cannot be read") from error


def note_origin(folder: Path, origin: Origin) -> None:
    """Note where a folder is from, and the digests of its files as they are now. Raises OSError."""
    _write(folder, replace(origin, files=_digests(folder)))


def complete_origin(folder: Path) -> None:
    """Note the digests that a folder lacks: all of one that an earlier release made, or its packed weights', added now.

    Raises
    ------
    ModelError : what the folder says of itself cannot be read.
    OSError : it cannot be written to.
    """
    origin = read_origin(folder)
    if not origin.files:
        note_origin(folder, origin)
    elif PACKED not in origin.files and (folder / PACKED).is_file():
        _write(folder, replace(origin, files={**origin.files, PACKED: file_digest(folder / PACKED)}))


def forget_packed(folder: Path) -> None:
    """Take packed weights that are to be made anew out of what is noted. Raises ModelError, OSError."""
    origin = read_origin(folder)
    if PACKED in origin.files:
        _write(folder, replace(origin, files={name: is_ for name, is_ in origin.files.items() if name != PACKED}))


def lacks_digests(folder: Path) -> bool:
    """Whether `complete_origin` would add any. Raises ModelError."""
    files = read_origin(folder).files
    return PACKED not in files and (not files or (folder / PACKED).is_file())


def checked_origin(folder: Path) -> Origin:
    """Where a folder is from, its files held against their digests, which are remembered from run to run.

    A folder without digests, which could not be completed either, passes as it is; so do packed weights that are gone.

    Raises
    ------
    ModelError : a file is another one than was made, is missing, or was put there later.
    """
    origin = read_origin(folder)
    if origin.files:
        found = _digests(folder)
        aside = {PACKED} - (origin.files.keys() & found.keys())
        wrong = {name for name in origin.files.keys() | found.keys() if found.get(name) != origin.files.get(name)}
        if wrong := wrong - aside:
            raise _damaged(folder, f"{min(wrong)} is not what was made")
    return origin


def _digests(folder: Path) -> dict[str, str]:
    """Digests of the files that shape what the model computes, or how a text becomes its tokens."""
    found = {}
    for path in sorted({folder / name for name in (*_SETTINGS, *TOKENIZER_FILES)} | {*folder.glob("*.safetensors")}):
        if path.is_file():
            with reading(path):
                found[path.name] = file_digest(path)
    return found


def _write(folder: Path, origin: Origin) -> None:
    write_atomically(folder / SOURCE, json.dumps(asdict(origin)).encode())


def _damaged(folder: Path, what: str) -> ModelError:
    return ModelError(
        f"the converted model in {folder} is damaged: {what}",
        "delete that folder; it is made again from the GGUF file",
    )
