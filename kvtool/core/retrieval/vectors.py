"""A vector for every chunk, kept beside the index for each embedding model: cosine, exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtool.core.cache.side_files import TABLES
from kvtool.core.common.types import Warn, warn_nobody
from kvtool.core.errors import DamagedError
from kvtool.core.retrieval.embed import Embeds
from kvtool.core.retrieval.index import Index, beginnings
from kvtool.core.retrieval.tables import Array, open_tables, open_unsealed, write_tables

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store

VECTORS_FORMAT = 2
_ROWS_AT_ONCE = 1024  # widened to float32; they stay in a core's cache, which makes it ten times as fast as 65,536
_REMEMBERED, _UNSEALED = f"index/embedder{TABLES}", "index/embedder.safetensors"
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
        """Read the vectors that are kept, or none; `warn` is told of damaged ones."""
        try:
            with suppress(FileNotFoundError, KeyError):
                tables = open_tables(path)
                if len(tables["keys"]) == len(tables["rows"]):
                    return cls(tables["keys"], tables["rows"])
        except (OSError, DamagedError) as error:
            warn(f"the vectors of the chunks are damaged and are made anew: {error}", "")
        return cls(np.empty(0, np.uint64), np.empty((0, 0), np.float16))

    def places(self, wanted: Array) -> Array:
        """The rows of these keys' vectors; -1 where there is none."""
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
        """Cosines with a question's unit vector (float32 `[dimensions]`), float64 `[places]`."""
        import torch

        asked = torch.from_numpy(np.ascontiguousarray(question))
        cosines = np.empty(len(self.rows))
        for at in range(0, len(self.rows), _ROWS_AT_ONCE):
            block = torch.from_numpy(np.array(self.rows[at : at + _ROWS_AT_ONCE]))
            cosines[at : at + _ROWS_AT_ONCE] = (block.float() @ asked).numpy()
        return cosines[places]


def keys_of(index: Index) -> Array:
    """A key for every row of the index, uint64, made of its chunk's id and its document's title."""
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
        """Open the vectors of all living chunks; missing ones are made and kept. Raises ModelError."""
        path = store.side_file(f"index/vectors-{VECTORS_FORMAT}-{embedder.digest}{TABLES}")
        vectors, living = Vectors.open(path, warn), _living_rows(index)

        def encode(positions: Array) -> Array:
            return embedder.encode(texts(living[positions].tolist()))

        if vectors.update(keys_of(index)[living], encode) and not store.read_only:
            with suppress(OSError):  # the disk is full: they are made again
                write_tables(path, {"keys": vectors.keys, "rows": vectors.rows}, {"model": embedder.ref})
                path.with_name(f"vectors-1-{embedder.digest}.safetensors").unlink(missing_ok=True)  # without a digest
        return cls(embedder, vectors, index)

    def __call__(self, question: str) -> Array:
        """Every row's likeness, from 0, the least alike, to 1; 0 for the dead. float64 `[rows]`."""
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


# ---- which model a store's vectors are of ----


def remember(store: Store, ref: str) -> None:
    """Let the questions of this store, and its next ingest, use this embedding model."""
    with suppress(OSError):
        write_tables(store.side_file(_REMEMBERED), {}, {"model": ref})


def remembered(store: Store, warn: Warn = warn_nobody) -> str | None:
    """The embedding model of the last ingest that named one; where that is damaged, `warn` is told."""
    for name, opened in ((_REMEMBERED, open_tables), (_UNSEALED, open_unsealed)):
        try:
            return opened(store.side_file(name)).texts["model"]
        except DamagedError as error:
            hint = "name it once more: `kvtool ingest PATH --embedder MODEL`"
            warn(f"the name of the embedding model is damaged, so meaning is left out: {error.message}", hint)
        except (OSError, KeyError):  # none was named
            continue
    return None
