"""Read a prompt's KV from the store or from memory, for the loader."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from kvtool.core.cache.buffers import Room, aligned
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded, LayerKV, Profiles, no_profiles
from kvtool.core.codec.decode import decodes_there
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
