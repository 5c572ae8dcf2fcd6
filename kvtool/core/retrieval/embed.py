"""Embeddings: models that turn texts into vectors (extra `embed`), and the vectors of a store's chunks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvtool.core.cache.side_files import TABLES
from kvtool.core.checkpoint.files import file_digest, looks_local
from kvtool.core.common.installing import extra_line
from kvtool.core.common.json_text import parsed
from kvtool.core.common.plugins import Plugin, PluginError, found
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.errors import DamagedError, ModelError
from kvtool.core.retrieval.index import Index, beginnings
from kvtool.core.retrieval.tables import Array, open_tables, write_tables

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store


_PICKLE = "pytorch_model.bin"
_BATCH = 64  # texts at once
_WANTED = ("*.json", "*.txt", "*.model", "*.safetensors")  # configuration, vocabulary, weights
Encode = Callable[[Sequence[str]], Array]
Count = Callable[[Sequence[str]], int]
_PLUGINS = found("embedders")


class Embeds(Protocol):
    """Turns texts into unit vectors.

    Attributes
    ----------
    ref : what it is called.
    """

    ref: str

    @property
    def digest(self) -> str:
        """Return the digest that distinguishes its vectors from another embedder's."""
        ...

    def encode(self, texts: Sequence[str]) -> Array:
        """Return unit vectors, float32 `[texts, dimensions]`. Raises ModelError."""
        ...

    def count(self, texts: Sequence[str]) -> int:
        """Return the number of tokens in texts, without special ones; 0 if it is unknown. Raises ModelError."""
        ...


def embedder_of(ref: str, offline: bool = False) -> Embeds:
    """Return the embedder of a name: a plugin's, if there is one and no folder is called so; else a model.

    Raises
    ------
    ModelError : there is no such model, its package is not installed, or the plugin cannot be used.
    """
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
        """See Embeds."""
        try:
            vectors = np.asarray(self._inner.encode(texts), dtype=np.float32)
        except Exception as error:
            raise self._broken(error) from error
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise self._broken(f"of {len(texts)} texts it makes {list(vectors.shape)} numbers")
        return _unit(vectors)

    def count(self, texts: Sequence[str]) -> int:
        """See Embeds. Packages are not asked for it."""
        return 0

    def _broken(self, why: object) -> ModelError:
        error = why if isinstance(why, PluginError) else self._plugin.broken(why)
        return ModelError(error.message, error.hint)


def _unit(vectors: Array) -> Array:
    """Return the same directions, each of length 1."""
    unit: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return unit


class Embedder:
    """A model that turns texts into unit vectors; it is loaded when the first text needs it.

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
        self._loaded: tuple[Encode, Count] | None = None
        self._static = _is_static(self._folder, ref)
        package = "model2vec" if self._static else "sentence_transformers"
        if find_spec(package) is None:
            raise ModelError(f"the embedding model {ref} needs the package {package}", extra_line("embed"))

    @property
    def digest(self) -> str:
        """Return the digest of configuration, vocabulary and weights, which distinguishes models' vectors."""
        digest = hashlib.sha256()
        for path in sorted({path for kind in _WANTED for path in self._folder.rglob(kind)}):
            digest.update(f"{path.relative_to(self._folder).as_posix()}:{file_digest(path)}\n".encode())
        return digest.hexdigest()[:24]

    def encode(self, texts: Sequence[str]) -> Array:
        """Turn texts into unit vectors, float32 `[texts, dimensions]`.

        Raises
        ------
        ModelError : the model cannot be loaded.
        """
        encode, _ = self._load()
        rows = []
        for at in range(0, len(texts), _BATCH):
            vectors = np.asarray(encode(texts[at : at + _BATCH]), dtype=np.float32)
            rows.append(_unit(vectors))
        return np.concatenate(rows) if rows else np.empty((0, 0), np.float32)

    def count(self, texts: Sequence[str]) -> int:
        """Count the tokens that the model reads of texts, without special ones. Raises as `encode` does."""
        _, count = self._load()
        return count(texts)

    def _load(self) -> tuple[Encode, Count]:
        if self._loaded is None:
            try:
                self._loaded = (_static if self._static else _sentence)(self._folder)
            except Exception as error:  # anything can be wrong with a model's files
                raise _unloadable(self.ref, error) from error
        return self._loaded


def _unloadable(ref: str, error: Exception) -> ModelError:
    from kvtool.core.checkpoint.load import OWN_CODE

    if "trust_remote_code" in str(error):
        return ModelError(f"the embedding model {ref} cannot be loaded: {OWN_CODE}", "use another model")
    return ModelError(f"the embedding model {ref} cannot be loaded: {error}", "download it again")


def _folder_of(ref: str, offline: bool) -> Path:
    """Find the model's local folder; a model of a hub is downloaded.

    Raises
    ------
    ModelError : it is not found, or its weights are not safetensors: other formats can run code when they are opened.
    """
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
        raise ModelError(
            f"{ref} has weights of a part only as {pickles[0].relative_to(folder)}",
            "use a model all of whose parts are published as safetensors",
        )
    return folder


def _is_static(folder: Path, ref: str) -> bool:
    """Return True if the model is a table of vectors, for which the package model2vec is enough."""
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
        model: Any = SentenceTransformer(
            str(folder), local_files_only=True, trust_remote_code=False, model_kwargs={"use_safetensors": True}
        )

    def count(texts: Sequence[str]) -> int:
        how = {"add_special_tokens": False, "truncation": True, "max_length": model.max_seq_length}
        return sum(map(len, model.tokenizer(list(texts), **how)["input_ids"])) if texts else 0

    return lambda texts: model.encode(list(texts), show_progress_bar=False), count


VECTORS_FORMAT = 1
_ROWS_AT_ONCE = 1024  # widened to float32; they stay in a core's cache, which makes it ten times as fast as 65,536
_REMEMBERED = f"index/embedder{TABLES}"
Texts = Callable[[Sequence[int]], list[str]]


class Vectors:
    """The unit vectors that one embedding model made, found by what was embedded.

    Attributes
    ----------
    keys : uint64 `[vectors]`, ascending: a chunk and its document's title.
    rows : float16 `[vectors, dimensions]`.
    """

    def __init__(self, keys: Array, rows: Array) -> None:
        self.keys, self.rows = keys, rows

    @classmethod
    def open(cls, path: Path, warn: Warn = warn_nobody) -> Vectors:
        """Read the stored vectors, if any; `warn` is called for damaged ones."""
        try:
            with suppress(FileNotFoundError, KeyError):
                tables = open_tables(path)
                if len(tables["keys"]) == len(tables["rows"]):
                    return cls(tables["keys"], tables["rows"])
        except (OSError, DamagedError) as error:
            warn(f"the vectors of the chunks are damaged and are made anew: {error}", "")
        return cls(np.empty(0, np.uint64), np.empty((0, 0), np.float16))

    def places(self, wanted: Array) -> Array:
        """Return the rows of these keys' vectors; -1 for a missing vector."""
        at = np.searchsorted(self.keys, wanted)
        known = at < len(self.keys)
        known[known] = self.keys[at[known]] == wanted[known]
        return np.where(known, at, -1)

    def update(self, wanted: Array, encode: Callable[[Array], Array]) -> bool:
        """Keep the vectors of these keys and no others; returns whether something changed.

        Parameters
        ----------
        encode : gives vectors for positions in `wanted`.
        """
        unique, first = np.unique(wanted, return_index=True)
        places = self.places(unique)
        missing = np.flatnonzero(places < 0)
        if not len(missing) and len(unique) == len(self.keys):
            return False
        made = encode(first[missing]).astype(np.float16) if len(missing) else None
        width = made.shape[1] if made is not None else self.rows.shape[1]
        rows, kept = np.empty((len(unique), width), np.float16), places >= 0
        if kept.any():
            rows[kept] = self.rows[places[kept]]
        if made is not None:
            rows[missing] = made
        self.keys, self.rows = unique, rows
        return True

    def likeness(self, places: Array, question: Array) -> Array:
        """Return the cosines with a question's unit vector (float32 `[dimensions]`), float64 `[places]`."""
        import torch

        asked = torch.from_numpy(np.ascontiguousarray(question))
        cosines = np.empty(len(self.rows))
        for at in range(0, len(self.rows), _ROWS_AT_ONCE):
            block = torch.from_numpy(np.array(self.rows[at : at + _ROWS_AT_ONCE]))
            cosines[at : at + _ROWS_AT_ONCE] = (block.float() @ asked).numpy()
        return cosines[places]


def keys_of(index: Index) -> Array:
    """Return a key for every row of the index, uint64, made of its chunk's id and its document's title."""
    parts = [np.empty(0, np.uint64)]
    for segment in index.segments:
        ids = beginnings(segment.tables["chunk_ids"])
        titles = np.repeat(segment.tables["title_ids"], segment.chunk_counts)
        parts.append(ids ^ (titles * np.uint64(0x9E3779B97F4A7C15)))
    return np.concatenate(parts)


class Meaning:
    """Says how like a question a store's chunks are, by one embedding model."""

    def __init__(self, embedder: Embeds, vectors: Vectors, index: Index) -> None:
        self._embedder, self._vectors = embedder, vectors
        self._places = vectors.places(keys_of(index))

    @classmethod
    def of(cls, store: Store, index: Index, embedder: Embeds, texts: Texts, warn: Warn = warn_nobody) -> Meaning:
        """Open the vectors of all living chunks; missing ones are computed and stored. Raises ModelError."""
        path = store.side_file(f"index/vectors-{VECTORS_FORMAT}-{embedder.digest}{TABLES}")
        vectors, living = Vectors.open(path, warn), _living_rows(index)

        def encode(positions: Array) -> Array:
            return embedder.encode(texts(living[positions].tolist()))

        if vectors.update(keys_of(index)[living], encode) and not store.read_only:
            with suppress(OSError):  # the disk is full: they are made again
                write_tables(path, {"keys": vectors.keys, "rows": vectors.rows}, {"model": embedder.ref})
        return cls(embedder, vectors, index)

    def __call__(self, question: str) -> Array:
        """Return every row's likeness, from 0, the least alike, to 1; 0 for the dead. float64 `[rows]`."""
        known = self._places >= 0
        likeness = np.zeros(len(self._places))
        if known.any():
            cosines = self._vectors.likeness(self._places[known], self._embedder.encode([question])[0])
            low, high = cosines.min(), cosines.max()
            likeness[known] = (cosines - low) / (high - low) if high > low else 1.0
        return likeness


def _living_rows(index: Index) -> Array:
    masks = [np.repeat(segment.alive, segment.chunk_counts) for segment in index.segments]
    return np.flatnonzero(np.concatenate([np.empty(0, bool), *masks]))


# ---- the model of a store's vectors ----


def remember(store: Store, ref: str) -> None:
    """Let the questions of this store, and its next ingest, use this embedding model."""
    with suppress(OSError):
        write_tables(store.side_file(_REMEMBERED), {}, {"model": ref})


def remembered(store: Store, warn: Warn = warn_nobody) -> str | None:
    """Return the embedding model of the last ingest that named one; where that is damaged, `warn` is called."""
    try:
        return open_tables(store.side_file(_REMEMBERED)).texts["model"]
    except DamagedError as error:
        hint = "name it once more: `kvtool ingest PATH --embedder MODEL`"
        warn(f"the name of the embedding model is damaged, so meaning is left out: {error.message}", hint)
    except (OSError, KeyError):  # none was named
        pass
    return None
