"""Lazily read catalogue of a shared store: a shard is read when one of its chunks is first asked for."""

from __future__ import annotations

from collections.abc import Mapping

from kvtool.core.remote.blobs import Blobs
from kvtool.core.remote.catalogue import Catalogue
from kvtool.core.remote.entries import Chunk
from kvtool.core.remote.reading import with_shards
from kvtool.core.remote.shards import number_of


class Offers:
    """The chunks of a catalogue.

    Parameters
    ----------
    root : what stands in shards is read from this machine's shelf, or else from the tier.
    """

    def __init__(self, blobs: Blobs, root: Catalogue) -> None:
        self._blobs, self._root = blobs, root
        self._read = dict[int, Mapping[str, Chunk]]()

    def get(self, key: str) -> Chunk | None:
        """A chunk by its id in hex; None: there is none. Raises RemoteError, DamagedError."""
        count = len(self._root.shards)
        if not count:
            return self._root.chunks.get(key)
        number = number_of(key, count)
        if number not in self._read:
            self._read[number] = with_shards(self._blobs, self._root, [number]).chunks
        return self._read[number].get(key)
