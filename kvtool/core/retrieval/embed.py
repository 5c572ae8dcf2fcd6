"""Texts → vectors, by any sentence-transformers or model2vec model (extra `embed`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kvtool.core.errors import ModelError
from kvtool.core.retrieval.tables import Array

_BATCH = 64  # texts at once
_WEIGHTS = ("*.safetensors", "*.bin", "*.onnx")
Encode = Callable[[Sequence[str]], Array]


class Embedder:
    """A model that turns texts into unit vectors. Loaded when the first text needs it.

    Attributes
    ----------
    ref : its folder or hub name.

    Raises
    ------
    ModelError : there is no such model, or its package is not installed.
    """

    def __init__(self, ref: str, offline: bool = False) -> None:
        self.ref = ref
        self._folder = _folder_of(ref, offline)
        self._encode: Encode | None = None
        self._static = _is_static(self._folder, ref)
        package = "model2vec" if self._static else "sentence_transformers"
        if find_spec(package) is None:
            raise ModelError(f"the embedding model {ref} needs the package {package}", "pip install 'kvtool[embed]'")

    @property
    def digest(self) -> str:
        """Of its configuration and weights: vectors of another one are another's."""
        found = hashlib.sha256()
        for path in sorted(self._folder.rglob("*")):
            if path.is_file() and (path.suffix == ".json" or any(path.match(kind) for kind in _WEIGHTS)):
                found.update(f"{path.relative_to(self._folder)}:{path.stat().st_size}".encode())
                found.update(path.read_bytes() if path.suffix == ".json" else _ends(path))
        return found.hexdigest()[:24]

    def encode(self, texts: Sequence[str]) -> Array:
        """Unit vectors, float32 `[texts, dimensions]`.

        Raises
        ------
        ModelError : the model cannot be loaded.
        """
        if self._encode is None:
            try:
                self._encode = (_static if self._static else _sentence)(self._folder)
            except Exception as error:  # whatever is wrong with a model's files
                raise ModelError(
                    f"the embedding model {self.ref} cannot be loaded: {error}", "download it again"
                ) from error
        rows = []
        for at in range(0, len(texts), _BATCH):
            some = texts[at : at + _BATCH]
            found = np.asarray(self._encode(some), dtype=np.float32)
            rows.append(found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12))
        return np.concatenate(rows) if rows else np.empty((0, 0), np.float32)


def _ends(path: Path) -> bytes:
    """The first and the last megabyte: where weights of one size differ, these do."""
    with path.open("rb") as file:
        head = file.read(2**20)
        file.seek(max(0, path.stat().st_size - 2**20))
        return head + file.read()


def _folder_of(ref: str, offline: bool) -> Path:
    """Its local folder; one of a hub is downloaded.

    Raises
    ------
    ModelError : there is none.
    """
    path = Path(ref).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{ref} holds no embedding model: config.json is missing", "name its folder")
        return path
    if path.exists() or ref.startswith((".", "/", "~")):
        raise ModelError(f"there is no embedding model at {ref}", "name a folder, or a model of the hub")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(ref, local_files_only=offline))
    except Exception as error:  # the hub's own errors have many types
        raise ModelError(
            f"the embedding model {ref} cannot be had: {type(error).__name__}",
            "check its name and the network, or name a local folder",
        ) from error


def _is_static(folder: Path, ref: str) -> bool:
    """Whether it is one of model2vec: a table of vectors, for which its own package is enough."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        modules = folder / "modules.json"
        parts = json.loads(modules.read_text(encoding="utf-8")) if modules.is_file() else []
        kinds = [str(part.get("type", "")) for part in parts]
        return config.get("model_type") == "model2vec" or any(kind.endswith(".StaticEmbedding") for kind in kinds)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{ref} holds no embedding model: config.json cannot be read", "download it again") from error


def _static(folder: Path) -> Encode:
    from model2vec import StaticModel

    model: Any = StaticModel.from_pretrained(str(folder))
    return lambda texts: model.encode(list(texts), show_progress_bar=False)


def _sentence(folder: Path) -> Encode:
    from sentence_transformers import SentenceTransformer

    from kvtool.core.model.load import quiet

    with quiet():
        model: Any = SentenceTransformer(str(folder), local_files_only=True)
    return lambda texts: model.encode(list(texts), show_progress_bar=False)
