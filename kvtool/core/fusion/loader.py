"""Where segments' keys and values are read from: a store, or memory between the store and the loader."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kvtool.core.cache.record import Allocator, aligned
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded, LayerKV, Profiles, no_profiles
from kvtool.core.codec.decode import decodes_there
from kvtool.core.codec.levels import RAW, level_of
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
