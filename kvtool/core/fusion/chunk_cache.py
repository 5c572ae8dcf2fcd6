"""A cache of decoded chunks in memory, between the store and the loader, for a process that answers many questions."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.loader import KVSource, ReadStats
from kvtool.core.fusion.plan import Segment

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder

Key = tuple[bytes, str]  # chunk id, level
Mark = Callable[[bytes, str, int], bytes | None]  # chunk id, level, layer


class ChunkCache(KVSource):
    """An LRU cache of at most `limit` bytes of decoded, un-rotated layers, by chunk; threads may read at once. Entries
    may be evicted at any time, so keep a reference while a GPU stream reads one. `mark` identifies the stored record of
    a chunk, level and layer; :meth:`recheck` drops replaced ones. `device`: a GPU that holds entries as its memory
    suffices."""

    def __init__(
        self,
        inner: KVSource,
        limit: int,
        mark: Mark = lambda chunk_id, level, layer: None,
        device: torch.device | None = None,
    ) -> None:
        self._inner, self._limit, self._mark, self._device = inner, limit, mark, device
        self._held: OrderedDict[Key, dict[int, tuple[LayerKV, bytes | None]]] = OrderedDict()  # by layer, with its mark
        self.held_bytes = 0
        self._lock = threading.Lock()

    def holds(self, segment: Segment, layers: int) -> bool:
        with self._lock:
            return len(self._held.get(_key(segment), {})) == layers

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        with self._lock:
            kvs = [self._get(segment, layer) for segment in segments]
        missing = [segment for segment, kv in zip(segments, kvs, strict=True) if kv is None]
        # Marks come first: a record that is replaced meanwhile is then dropped by `recheck`.
        marks = [self._mark(*_key(segment), layer) for segment in missing]
        copies = self._copies(self._inner.read(missing, layer, stats)) if missing else []
        with self._lock:
            for segment, kv, mark in zip(missing, copies, marks, strict=True):
                self._keep(segment, layer, kv, mark)
        added = iter(copies)
        return [next(added) if kv is None else kv for kv in kvs]

    def hold(self, segment: Segment, layers: Sequence[LayerKV]) -> None:
        copies = self._copies(layers)
        with self._lock:
            for layer, kv in enumerate(copies):
                self._keep(segment, layer, kv, None)

    def forget(self, segment: Segment) -> None:
        with self._lock:
            self._drop(_key(segment))

    def recheck(self) -> None:
        """Drop chunks whose records have changed or gone; KV from another source has no record at first."""
        with self._lock:
            for key, layers in list(self._held.items()):
                marks = {layer: self._mark(*key, layer) for layer in layers}
                if all(mark in (None, marks[layer]) for layer, (_, mark) in layers.items()):
                    self._held[key] = {layer: (kv, marks[layer]) for layer, (kv, _) in layers.items()}
                else:
                    self._drop(key)

    def _drop(self, key: Key) -> None:
        self.held_bytes -= sum(_size(kv) for kv, _ in self._held.pop(key, {}).values())

    def _get(self, segment: Segment, layer: int) -> LayerKV | None:
        key = _key(segment)
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key, {}).get(layer, (None,))[0]

    def _copies(self, kvs: Sequence[LayerKV]) -> list[LayerKV]:
        """Copy KV that is to be held: a view would retain its whole decoding buffer, or memory that is reused."""
        copies = [(self._copy(keys), self._copy(values)) for keys, values in kvs]
        there = next((side for kv in copies for side in kv if side.is_cuda), None)
        if there is not None:  # the next question reads them from another stream
            torch.cuda.current_stream(there.device).synchronize()
        return copies

    def _copy(self, side: torch.Tensor) -> torch.Tensor:
        if self._device is None or side.is_cuda:
            return side.clone()
        try:
            return side.to(self._device, non_blocking=True)
        except torch.OutOfMemoryError:
            return side.clone()

    def _keep(self, segment: Segment, layer: int, kv: LayerKV, mark: bytes | None) -> None:
        key = _key(segment)
        layers = self._held.setdefault(key, {})
        if layer not in layers:
            layers[layer] = kv, mark
            self.held_bytes += _size(kv)
        while self.held_bytes > self._limit:
            self._drop(next(iter(self._held)))


class RecentChunks:
    """Chunk ids that an LRU memory of `limit` bytes holds after the questions so far. Ranking may depend on these:
    unlike the contents of `ChunkCache` they do not vary with the speed of loader threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._sizes

    def use(self, chunk_id: bytes, size: int) -> None:
        self._sizes[chunk_id] = size
        self._sizes.move_to_end(chunk_id)
        while sum(self._sizes.values()) > self._limit:
            self._sizes.popitem(last=False)


def held_on(decoder: Decoder) -> torch.device | None:
    return torch.device(decoder.device) if decoder.device.startswith("cuda") else None


def _key(segment: Segment) -> Key:
    return segment.source.chunk_id, segment.source.level or ""


def _size(kv: LayerKV) -> int:
    return kv[0].nbytes + kv[1].nbytes
