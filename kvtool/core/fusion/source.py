"""Read the KV of a prompt's segments: from the store, from memory, or through a cache of decoded chunks."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from kvtool.core.cache.buffers import Room, aligned
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded, LayerKV, Profiles, no_profiles
from kvtool.core.codec.coefficient_buffer import decodes_there
from kvtool.core.codec.levels import RAW, level_of
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.plan import Candidate, Segment
from kvtool.core.records.read import Unusable, kept_rows, read_layer, stored_rows, stored_shape

if TYPE_CHECKING:
    from kvtool.core.cache.link import RecordReader
    from kvtool.core.common.types import Ids
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.model.prefill import ChunkKV


class RecordMissing(Exception):
    """A record that the plan counts on cannot be used; its segment becomes a hole.

    Attributes
    ----------
    stored : it is there all the same, and is not to be stored again.
    unusable : this segment and others that cannot be used either, each with why.
    """

    def __init__(
        self, segment: Segment, reason: str, stored: bool = False, others: Sequence[tuple[Segment, str]] = ()
    ) -> None:
        super().__init__(reason)
        self.segment = segment
        self.reason = reason
        self.stored = stored
        self.unusable = ((segment, reason), *others)


@dataclass(slots=True)
class ReadStats:
    """What one reading thread has to itself: bytes read and seconds spent, summed over layers.

    Attributes
    ----------
    room : memory for the records of the layer that is read; a source that keeps any of it copies it.
    reading : the segment whose record is being read, and since when (`time.perf_counter`); None: none is.
    layers : by the start of a segment, those that are read of it; empty: it may be any.
    """

    bytes_read: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    room: Room = aligned
    reading: tuple[Segment, float] | None = None
    layers: Mapping[int, Collection[int]] = field(default_factory=dict)


class KVSource(Protocol):
    """Reads one layer's un-rotated keys and values `[kv_heads, tokens, head_dim]` of several segments."""

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]: ...


@dataclass(frozen=True)
class StoreSource:
    """Records of a store for a model; every one is verified against its digest, its shape and the wanted level."""

    store: RecordReader
    decoder: Decoder
    profiles: Profiles = no_profiles

    @cached_property
    def device(self) -> torch.device | None:
        """Where a codec may decode: the model's device if that can be done there; None: in main memory."""
        return torch.device(self.decoder.device) if decodes_there(self.decoder.device) else None

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        by_start: dict[int, LayerKV] = {}
        for level in sorted({segment.source.level or RAW for segment in segments}):
            some = [s for s in segments if (s.source.level or RAW) == level]
            items = self._encoded(some, level, layer, stats)
            started = time.perf_counter()
            by_start.update(zip((s.start for s in some), self._decoded(some, items, level, layer), strict=True))
            stats.decode_s += time.perf_counter() - started
        return [by_start[segment.start] for segment in segments]

    def _decoded(self, segments: Sequence[Segment], items: list[Encoded], level: str, layer: int) -> list[LayerKV]:
        codec = CODECS[level]
        try:
            return codec.decode(items, layer, self.profiles, self.device)
        except DamagedError as together:  # which one is it?
            for segment, item in zip(segments, items, strict=True):
                try:
                    codec.decode([item], layer, self.profiles, self.device)
                except DamagedError as error:
                    raise RecordMissing(segment, f"damaged: {error.message}") from error
            raise RecordMissing(segments[0], f"damaged: {together.message}") from together

    def _encoded(self, segments: Sequence[Segment], level: str, layer: int, stats: ReadStats) -> list[Encoded]:
        """One level's records, each with the coarser one that it refines."""

        def before(number: int) -> None:
            stats.reading = segments[number], time.perf_counter()

        started = time.perf_counter()
        chunk_ids = [segment.source.chunk_id for segment in segments]
        shapes = [stored_shape(self.decoder.shapes[layer], len(segment.source.ids)) for segment in segments]
        # What has to be decoded does not cross as it stands.
        room = stats.room if level_of(level).verbatim else aligned
        ahead = [stats.layers[segment.start] for segment in segments] if stats.layers else None
        read = read_layer(self.store, chunk_ids, level, layer, shapes=shapes, before=before, room=room, ahead=ahead)
        stats.reading = None
        stats.read_s += time.perf_counter() - started
        records = [record for record in read if isinstance(record, Encoded)]
        stats.bytes_read += sum(len(record.payload) for top in records for record in top.chain())
        unusable = [(s, why) for s, item in zip(segments, read, strict=True) if (why := _why_not(s, item, level))]
        if unusable:
            raise RecordMissing(*unusable[0], others=unusable[1:])
        return records


def _why_not(segment: Segment, item: Encoded | Unusable, level: str) -> str:
    """Why a record does not serve a segment; empty where it does."""
    if isinstance(item, Unusable):
        return item.reason
    try:
        rows = stored_rows(item, level)
    except DamagedError as error:
        return f"damaged: {error.message}"
    return "" if rows == segment.source.kept else "damaged: it holds other rows of the chunk than layer 0 did"


@dataclass(frozen=True, slots=True)
class MemorySource:
    """Chunk KVs held in memory, by chunk id (the gate, tests, a chunk just computed)."""

    chunks: dict[bytes, ChunkKV]

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        chunks = [self.chunks[segment.source.chunk_id] for segment in segments]
        return [(chunk.keys[layer], chunk.values[layer]) for chunk in chunks]


def with_rows(store: RecordReader, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Segments that are wanted at some levels, with what these say of the rows that are stored.

    The records say it: of a level that leaves rows out the first layer's are read. Where one cannot be, its chunk is a
    hole.
    """
    made = list(candidates)
    for level in {one.level for one in candidates if one.level is not None}:
        numbers = [number for number, one in enumerate(made) if one.level == level]
        found = kept_rows(store, [made[number].chunk_id for number in numbers], level)
        for number, rows in zip(numbers, found, strict=True):
            made[number] = _with(made[number], rows)
    return made


def _with(candidate: Candidate, rows: Ids | Unusable | None) -> Candidate:
    if isinstance(rows, Unusable):
        return replace(candidate, level=None, kept=None, reason=rows.reason)
    return replace(candidate, kept=rows) if rows != candidate.kept else candidate


Key = tuple[bytes, str]  # chunk id, level
Mark = Callable[[bytes, str, int], bytes | None]  # chunk id, level, layer


class ChunkCache:
    """Keeps decoded, un-rotated layers of the chunks used last, as the model's own numbers.

    Records were verified when they were read; whether they still stand on disk is asked by :meth:`recheck`. Threads
    may read at once. What is read may be let go of here at any time: whoever has a GPU read it keeps it until that is
    done, since its memory then goes to the stream in which it was made.

    Parameters
    ----------
    limit : bytes held at most; the chunk used longest ago goes first, with all its layers.
    mark : what tells a chunk's record of a level and layer from others of the same place; None: there is none.
    device : a GPU on which it is held, as long as there is room; None: it is held where it was decoded.
    """

    def __init__(
        self,
        inner: KVSource,
        limit: int,
        mark: Mark = lambda chunk_id, level, layer: None,
        device: torch.device | None = None,
    ) -> None:
        self._inner = inner
        self._limit = limit
        self._mark = mark
        self._device = device
        self._marks: dict[Key, dict[int, bytes | None]] = {}
        self._held: OrderedDict[Key, dict[int, LayerKV]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return self._bytes

    def holds(self, segment: Segment, layers: int) -> bool:
        """Whether all of so many layers of it are held."""
        with self._lock:
            return len(self._held.get(_key(segment), {})) == layers

    def held_layers(self, segment: Segment) -> set[int]:
        """The layers of it that are held."""
        with self._lock:
            return {*self._held.get(_key(segment), {})}

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        """One layer's keys and values of several segments (KVSource): from memory, else from the source behind it."""
        with self._lock:
            found = [self._get(_key(segment), layer) for segment in segments]
        missing = [number for number, kv in enumerate(found) if kv is None]
        if missing:
            wanted = [segments[number] for number in missing]
            # Marks come first: what is replaced meanwhile is then dropped.
            marks = [self._mark(*_key(segment), layer) for segment in wanted]
            copies = self._copies(self._inner.read(wanted, layer, stats))
            with self._lock:
                for number, kv, mark in zip(missing, copies, marks, strict=True):
                    found[number] = kv
                    self._keep(_key(segments[number]), layer, kv, mark)
        return [kv for kv in found if kv is not None]

    def whole(self, segments: Sequence[Segment], layers: int) -> list[list[LayerKV]] | None:
        """All layers of several segments, by layer; None: some are not held, or not on a GPU."""
        with self._lock:
            found = [[self._get(_key(segment), layer) for segment in segments] for layer in range(layers)]
        whole = [[kv for kv in kvs if kv is not None and kv[0].is_cuda] for kvs in found]
        return whole if all(len(kvs) == len(segments) for kvs in whole) else None

    def hold(self, segment: Segment, layers: Sequence[LayerKV]) -> None:
        """Hold all layers of KV that came from elsewhere, un-rotated."""
        copies = self._copies(layers)
        with self._lock:
            for layer, kv in enumerate(copies):
                self._keep(_key(segment), layer, kv, None)

    def forget(self, segment: Segment) -> None:
        """Hold nothing of it any more."""
        with self._lock:
            self._drop(_key(segment))

    def recheck(self) -> None:
        """Let go of what has other records now, or none. What came from elsewhere has none at first."""
        with self._lock:
            for key in list(self._held):
                marks = self._marks[key]
                now = {layer: self._mark(*key, layer) for layer in marks}
                if all(before in (None, now[layer]) for layer, before in marks.items()):
                    self._marks[key] = now
                else:
                    self._drop(key)

    def _drop(self, key: Key) -> None:
        self._marks.pop(key, None)
        self._bytes -= sum(map(_size, self._held.pop(key, {}).values()))

    def _get(self, key: Key, layer: int) -> LayerKV | None:
        layers = self._held.get(key)
        if layers is None:
            return None
        self._held.move_to_end(key)
        return layers.get(layer)

    def _copies(self, kvs: Sequence[LayerKV]) -> list[LayerKV]:
        """Copies to be held: a view would hold all that was decoded with it, or stand in memory that is used again."""
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

    def _keep(self, key: Key, layer: int, kv: LayerKV, mark: bytes | None) -> None:
        layers = self._held.setdefault(key, {})
        if layer not in layers:
            layers[layer] = kv
            self._bytes += _size(kv)
            self._marks.setdefault(key, {})[layer] = mark
        while self._bytes > self._limit:
            self._drop(next(iter(self._held)))


class RecentChunks:
    """Which chunks a memory of `limit` bytes holds after the questions so far: those used last.

    Counted a question at a time, so that it does not depend on which loader thread was faster, as what `ChunkCache`
    holds at its limit does; results may depend on this.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._sizes

    def use(self, chunk_id: bytes, size: int) -> None:
        """A question has used a chunk of so many decoded bytes."""
        self._sizes[chunk_id] = size
        self._sizes.move_to_end(chunk_id)
        while sum(self._sizes.values()) > self._limit:
            self._sizes.popitem(last=False)


def held_on(decoder: Decoder) -> torch.device | None:
    """Where a model's chunks are best held: on its GPU; None: it has none."""
    return torch.device(decoder.device) if decoder.device.startswith("cuda") else None


def _key(segment: Segment) -> Key:
    return segment.source.chunk_id, segment.source.level or ""


def _size(kv: LayerKV) -> int:
    return kv[0].nbytes + kv[1].nbytes
