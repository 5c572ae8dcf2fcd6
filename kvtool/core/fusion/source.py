"""Where segments' keys and values are read from: a store, or memory between the store and the loader."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kvtool.core.cache.record import Allocator, aligned
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded, LayerKV, Profiles, no_profiles
from kvtool.core.codec.levels import RAW, level_of
from kvtool.core.codec.transform import decodes_there
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.plan import Segment
from kvtool.core.model.decoder import Decoder
from kvtool.core.records.read import Unusable, read_layer, stored_rows, stored_shape

if TYPE_CHECKING:
    from kvtool.core.cache.chunks import ChunkReader
    from kvtool.core.model.prefill import ChunkKV


class RecordMissing(Exception):
    """A record of the plan cannot be used; its segment, and those of `others`, become holes. `stored`: the record
    exists nevertheless, and is not to be stored again."""

    def __init__(
        self, segment: Segment, reason: str, stored: bool = False, others: Sequence[tuple[Segment, str]] = ()
    ) -> None:
        super().__init__(reason)
        self.segment, self.reason, self.stored = segment, reason, stored
        self.unusable = ((segment, reason), *others)


@dataclass(slots=True)
class ReadStats:
    """State of one reading thread. `allocate` gives memory for the current layer's records, copied by a source that
    keeps any; `reading`: the segment whose record is being read, and since when; None between records."""

    bytes_read: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    allocate: Allocator = aligned
    reading: tuple[Segment, float] | None = None


class KVSource(ABC):
    """A source of segments' un-rotated keys and values, `[kv_heads, tokens, head_dim]`."""

    @abstractmethod
    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        """Read one layer, by segment."""


@dataclass(frozen=True)
class StoreSource(KVSource):
    store: ChunkReader
    decoder: Decoder
    profiles: Profiles = no_profiles

    @cached_property
    def device(self) -> torch.device | None:
        """The device on which a codec decodes; None: main memory."""
        return torch.device(self.decoder.device) if decodes_there(self.decoder.device) else None

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        by_start: dict[int, LayerKV] = {}
        for level in sorted({segment.source.level or RAW for segment in segments}):
            same = [segment for segment in segments if (segment.source.level or RAW) == level]
            items = self._encoded(same, level, layer, stats)
            started = time.perf_counter()
            kvs = self._decoded(same, items, level, layer)
            by_start |= zip((segment.start for segment in same), kvs, strict=True)
            stats.decode_s += time.perf_counter() - started
        return [by_start[segment.start] for segment in segments]

    def _decoded(self, segments: Sequence[Segment], items: list[Encoded], level: str, layer: int) -> list[LayerKV]:
        codec = CODECS[level]
        try:
            return codec.decode(items, layer, self.profiles, self.device)
        except DamagedError as together:  # find the damaged one
            for segment, item in zip(segments, items, strict=True):
                try:
                    codec.decode([item], layer, self.profiles, self.device)
                except DamagedError as error:
                    raise RecordMissing(segment, f"damaged: {error.message}") from error
            raise RecordMissing(segments[0], f"damaged: {together.message}") from together

    def _encoded(self, segments: Sequence[Segment], level: str, layer: int, stats: ReadStats) -> list[Encoded]:
        def before(number: int) -> None:
            stats.reading = segments[number], time.perf_counter()

        started = time.perf_counter()
        sources = [segment.source for segment in segments]
        tokens = [len(source.ids) if source.part is None else source.part.of for source in sources]
        shapes = [stored_shape(self.decoder.shapes[layer], count) for count in tokens]
        chunk_ids = [source.chunk_id for source in sources]
        # Only records that need no decoding are uploaded as their bytes are.
        allocate = stats.allocate if level_of(level).verbatim else aligned
        read = read_layer(self.store, chunk_ids, level, layer, shapes=shapes, before=before, allocate=allocate)
        stats.reading = None
        stats.read_s += time.perf_counter() - started
        records = [record for record in read if isinstance(record, Encoded)]
        stats.bytes_read += sum(len(record.payload) for top in records for record in top.chain())
        unusable = [(s, why) for s, item in zip(segments, read, strict=True) if (why := _why_not(s, item, level))]
        if unusable:
            raise RecordMissing(*unusable[0], others=unusable[1:])
        return records


def _why_not(segment: Segment, item: Encoded | Unusable, level: str) -> str:
    if isinstance(item, Unusable):
        return item.reason
    try:
        rows = stored_rows(item, level)
    except DamagedError as error:
        return f"damaged: {error.message}"
    return "" if rows == segment.source.stored_rows else "damaged: it holds other rows of the chunk than layer 0 did"


@dataclass(frozen=True, slots=True)
class MemorySource(KVSource):
    chunks: dict[bytes, ChunkKV]

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        chunks = [self.chunks[segment.source.chunk_id] for segment in segments]
        return [(chunk.keys[layer], chunk.values[layer]) for chunk in chunks]


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
