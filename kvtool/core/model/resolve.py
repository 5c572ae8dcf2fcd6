"""From what the user calls a model to a folder that can be loaded. No torch, except to convert a GGUF once."""

from __future__ import annotations

import re
from pathlib import Path

from kvtool.core.errors import ModelError
from kvtool.core.model.files import PACKAGED, WAYS_OUT, ModelFiles, Once, check_folder, unnoticed

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def resolve(ref: str, *, offline: bool = False, once: Once = unnoticed) -> ModelFiles:
    """Find a model: a folder, a `*.gguf` file, `smollm2`, or else a name on the model hub.

    A hub name is downloaded on first use, a GGUF file converted on first use (`model/gguf.py`).

    Parameters
    ----------
    once : entered while that is done, which may take minutes.

    Raises
    ------
    ModelError : not found, incomplete, not loadable, or out of reach.
    """
    if not ref.strip():
        raise ModelError("the model's name is empty", WAYS_OUT)
    if ref == PACKAGED:
        return _packaged(once)
    path = Path(ref).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise ModelError(f"{ref!r} is neither a file name nor a model's name: {error}", WAYS_OUT) from error
    if exists or looks_local(ref):
        return _local(path, once)
    if not _HUB_NAME.fullmatch(ref):
        raise ModelError(f"there is no file {ref!r}, and it is not a model hub's name either", WAYS_OUT)
    from kvtool.core.model import hub

    return ModelFiles(ref, hub.fetched(ref, offline=offline, once=once), "hub")


def _packaged(once: Once) -> ModelFiles:
    from kvtool.core.model.gguf import converted
    from kvtool.core.model.packaged import find_packaged

    return ModelFiles(PACKAGED, converted(find_packaged(), once), "packaged")


def looks_local(ref: str) -> bool:
    """Whether a reference is spelled like a path, so that a typo in it is not looked for on the hub."""
    return ref.startswith(("/", ".", "~")) or "\\" in ref or ref.count("/") > 1 or ref.lower().endswith(".gguf")


def _local(path: Path, once: Once) -> ModelFiles:
    path = path.absolute()
    if path.is_dir():
        check_folder(path)
        return ModelFiles(str(path), path, "folder")
    if path.suffix.lower() == ".gguf":
        from kvtool.core.model.gguf import converted

        return ModelFiles(str(path), converted(path, once), "gguf")
    if path.exists():
        raise ModelError(f"{path} is not a model folder and not a GGUF file", WAYS_OUT)
    raise ModelError(f"there is no model at {path}", WAYS_OUT)
