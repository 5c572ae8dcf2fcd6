"""Embeddings: models that turn texts into vectors (extra `embed`), and the vectors of a store's chunks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtool.core.cache.side_files import TABLES
from kvtool.core.checkpoint.files import file_digest, looks_local
from kvtool.core.common.plugins import Plugin, PluginError, extra_line, found
from kvtool.core.common.text import parsed
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.errors import DamagedError, ModelError
from kvtool.core.retrieval.index import Index, beginnings
from kvtool.core.retrieval.passages import Passage
from kvtool.core.retrieval.segment import Array, open_tables, positions_in, write_tables

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store


_PICKLE = "pytorch_model.bin"
_BATCH = 64  # texts at once
_WANTED = ("*.json", "*.txt", "*.model", "*.safetensors")  # configuration, vocabulary, weights
Encode = Callable[[Sequence[str]], Array]
Count = Callable[[Sequence[str]], int]
_PLUGINS = found("embedders")


def embedder_of(ref: str, offline: bool = False) -> Embeds:
    plugin = _PLUGINS.get(ref)
    return Embedder(ref, offline) if plugin is None or Path(ref).exists() else _Plugged(plugin)


class _Plugged:
    """An embedder of another package: an object with `digest` and `encode`, made without arguments."""

    def __init__(self, plugin: Plugin) -> None:
        self.ref, self._plugin = plugin.name, plugin
        try:
            self._inner = plugin.load()()
            self.digest = str(self._inner.digest)
        except Exception as error:
            raise self._broken(error) from error
        if not re.fullmatch(r"[A-Za-z0-9]{1,24}", self.digest):
            raise self._broken("its digest is not of 1 to 24 letters and digits")

    def encode(self, texts: Sequence[str]) -> Array:
        try:
            vectors = np.asarray(self._inner.encode(texts), dtype=np.float32)
        except Exception as error:
            raise self._broken(error) from error
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise self._broken(f"of {len(texts)} texts it makes {list(vectors.shape)} numbers")
        return _unit(vectors)

    def count(self, texts: Sequence[str]) -> int:
        return 0  # unknown

    def _broken(self, why: object) -> ModelError:
        error = why if isinstance(why, PluginError) else self._plugin.broken(why)
        return ModelError(error.message, error.hint)


def _unit(vectors: Array) -> Array:
    unit: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return unit


class Embedder:
    """A model that is loaded when the first text needs it; `ref` is its folder or hub name. Raises ModelError."""

    def __init__(self, ref: str, offline: bool = False) -> None:
        self.ref = ref
        self._folder = _folder_of(ref, offline)
        self._loaded: tuple[Encode, Count] | None = None
        self._static = _is_static(self._folder, ref)
        package = "model2vec" if self._static else "sentence_transformers"
        if find_spec(package) is None:
            raise ModelError(f"the embedding model {ref} needs the package {package}", extra_line("embed"))

    @property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for path in sorted({path for kind in _WANTED for path in self._folder.rglob(kind)}):
            digest.update(f"{path.relative_to(self._folder).as_posix()}:{file_digest(path)}\n".encode())
        return digest.hexdigest()[:24]

    def encode(self, texts: Sequence[str]) -> Array:
        encode, _ = self._load()
        batches = (encode(texts[at : at + _BATCH]) for at in range(0, len(texts), _BATCH))
        rows = [_unit(np.asarray(vectors, dtype=np.float32)) for vectors in batches]
        return np.concatenate(rows) if rows else np.empty((0, 0), np.float32)

    def count(self, texts: Sequence[str]) -> int:
        _, count = self._load()
        return count(texts)

    def _load(self) -> tuple[Encode, Count]:
        if self._loaded is None:
            try:
                self._loaded = (_static if self._static else _sentence)(self._folder)
            except Exception as error:  # anything can be wrong with a model's files
                from kvtool.core.checkpoint.load import OWN_CODE

                has_code = "trust_remote_code" in str(error)
                why, hint = (OWN_CODE, "use another model") if has_code else (error, "download it again")
                raise ModelError(f"the embedding model {self.ref} cannot be loaded: {why}", hint) from error
        return self._loaded


Embeds = Embedder | _Plugged


def _folder_of(ref: str, offline: bool) -> Path:
    path = Path(ref).expanduser()
    if path.exists() or looks_local(ref):
        if not path.is_dir():
            raise ModelError(f"there is no embedding model at {ref}", "name a folder, or a model of the hub")
        folder = path
    else:
        from kvtool.core.checkpoint.hub import snapshot

        folder = snapshot(ref, list(_WANTED), offline=offline)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{ref} holds no embedding model: config.json is missing", "name its folder")
    if not any(folder.rglob("*.safetensors")):
        raise ModelError(f"{ref} holds no safetensors weights", "use a model that is published as safetensors")
    if pickles := [path for path in folder.rglob(_PICKLE) if not any(path.parent.glob("*.safetensors"))]:
        hint = "use a model all of whose parts are published as safetensors"
        raise ModelError(f"{ref} has weights of a part only as {pickles[0].relative_to(folder)}", hint)
    return folder


def _is_static(folder: Path, ref: str) -> bool:
    try:
        config: dict[str, Any] = parsed((folder / "config.json").read_text(encoding="utf-8"))
        modules = folder / "modules.json"
        parts = parsed(modules.read_text(encoding="utf-8")) if modules.is_file() else []
        kinds = [str(part.get("type", "")) for part in parts]
        return config.get("model_type") == "model2vec" or any(kind.endswith(".StaticEmbedding") for kind in kinds)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{ref} holds no embedding model: config.json cannot be read", "download it again") from error


def _static(folder: Path) -> tuple[Encode, Count]:
    from model2vec import StaticModel

    model: Any = StaticModel.from_pretrained(str(folder))
    return (
        lambda texts: model.encode(list(texts), show_progress_bar=False),
        lambda texts: sum(map(len, model.tokenizer.encode_batch(list(texts), add_special_tokens=False))),
    )


def _sentence(folder: Path) -> tuple[Encode, Count]:
    from sentence_transformers import SentenceTransformer

    from kvtool.core.common.collecting import quiet

    with quiet():
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        model: Any = SentenceTransformer(str(folder), **options, model_kwargs={"use_safetensors": True})

    def count(texts: Sequence[str]) -> int:
        how = {"add_special_tokens": False, "truncation": True, "max_length": model.max_seq_length}
        return sum(map(len, model.tokenizer(list(texts), **how)["input_ids"])) if texts else 0

    return lambda texts: model.encode(list(texts), show_progress_bar=False), count


VECTORS_FORMAT = 1
_ROWS_AT_ONCE = 1024  # widened to float32; they stay in a core's cache, which makes it ten times as fast as 65,536
_REMEMBERED = f"index/embedder{TABLES}"


class Vectors:
    """Unit vectors, float16 `[vectors, dimensions]`, by ascending keys of a chunk and its document's title."""

    def __init__(self, keys: Array, rows: Array) -> None:
        self.keys, self.rows = keys, rows

    @classmethod
    def open(cls, path: Path, warn: Warn = warn_nobody) -> Vectors:
        try:
            with suppress(FileNotFoundError):
                tables = open_tables(path)
                return cls(tables["keys"], tables["rows"])
        except (OSError, DamagedError) as error:
            warn(f"the vectors of the chunks are damaged and are made anew: {error}", "")
        return cls(np.empty(0, np.uint64), np.empty((0, 0), np.float16))

    def update(self, wanted: Array, encode: Callable[[Array], Array]) -> bool:
        """Keep the vectors of these keys and no others; returns whether something changed."""
        unique, first = np.unique(wanted, return_index=True)
        places = positions_in(self.keys, unique)
        missing = np.flatnonzero(places < 0)
        if len(missing):
            rows = encode(first[missing]).astype(np.float16)
            # of no vectors the width is not known
            self.rows = np.concatenate((self.rows, rows)) if len(self.rows) else rows
            places[missing] = np.arange(len(self.rows) - len(rows), len(self.rows))
        elif len(unique) == len(self.keys):
            return False
        self.keys, self.rows = unique, self.rows[places]
        return True

    def likeness(self, places: Array, question: Array) -> Array:
        """Cosines with a question's unit vector (float32 `[dimensions]`), float64 `[places]`."""
        import torch

        asked = torch.from_numpy(np.ascontiguousarray(question))
        cosines = np.empty(len(self.rows))
        for at in range(0, len(self.rows), _ROWS_AT_ONCE):
            block = torch.from_numpy(np.array(self.rows[at : at + _ROWS_AT_ONCE]))
            cosines[at : at + _ROWS_AT_ONCE] = (block.float() @ asked).numpy()
        return cosines[places]


def keys_of(index: Index) -> Array:
    """A key for every row of the index, uint64, of its chunk's id and its document's title."""
    parts = [np.empty(0, np.uint64)]
    for segment in index.segments:
        ids = beginnings(segment.tables["chunk_ids"])
        titles = np.repeat(segment.tables["title_ids"], segment.chunk_counts)
        parts.append(ids ^ (titles * np.uint64(0x9E3779B97F4A7C15)))
    return np.concatenate(parts)


class Meaning:
    def __init__(self, embedder: Embeds, vectors: Vectors, index: Index) -> None:
        self._embedder, self._vectors = embedder, vectors
        self._places = positions_in(vectors.keys, keys_of(index))

    @classmethod
    def of(
        cls, store: Store, index: Index, embedder: Embeds, text_of: Callable[[Passage], str], warn: Warn = warn_nobody
    ) -> Meaning:
        """Open the vectors of all living chunks; compute and store missing ones. Raises ModelError."""
        path = store.side_file(f"index/vectors-{VECTORS_FORMAT}-{embedder.digest}{TABLES}")
        masks = [np.repeat(segment.alive, segment.chunk_counts) for segment in index.segments]
        vectors, living = Vectors.open(path, warn), np.flatnonzero(np.concatenate([np.empty(0, bool), *masks]))

        def encode(positions: Array) -> Array:
            return embedder.encode([text_of(index.passage(row)) for row in living[positions].tolist()])

        if vectors.update(keys_of(index)[living], encode) and not store.read_only:
            with suppress(OSError):  # the disk is full: they are made again
                write_tables(path, {"keys": vectors.keys, "rows": vectors.rows}, {"model": embedder.ref})
        return cls(embedder, vectors, index)

    def __call__(self, question: str) -> Array:
        """Likeness of every row, 0 (the least alike) to 1; 0 for the dead. float64 `[rows]`."""
        known = self._places >= 0
        likeness = np.zeros(len(self._places))
        if known.any():
            cosines = self._vectors.likeness(self._places[known], self._embedder.encode([question])[0])
            low, high = cosines.min(), cosines.max()
            likeness[known] = (cosines - low) / (high - low) if high > low else 1.0
        return likeness


def remember(store: Store, ref: str) -> None:
    with suppress(OSError):
        write_tables(store.side_file(_REMEMBERED), {}, {"model": ref})


def remembered(store: Store, warn: Warn = warn_nobody) -> str | None:
    with suppress(OSError):  # none was named
        try:
            return open_tables(store.side_file(_REMEMBERED)).texts["model"]
        except DamagedError as error:
            hint = "name it once more: `kvtool ingest PATH --embedder MODEL`"
            warn(f"the name of the embedding model is damaged, so meaning is left out: {error.message}", hint)
    return None
