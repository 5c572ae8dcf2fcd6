"""Where the loader takes a prompt's KV from: the store, or memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from kvtool.core.codec import CODECS
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.plan import Segment

if TYPE_CHECKING:
    from kvtool.core.cache.store import KVRead, Store
    from kvtool.core.model.prefill import ChunkKV

LayerKV = tuple[torch.Tensor, torch.Tensor]


class RecordMissing(Exception):
    """A record that the plan counts on cannot be used; its segment becomes a hole."""

    def __init__(self, segment: Segment, reason: str) -> None:
        super().__init__(reason)
        self.segment = segment
        self.reason = reason


@dataclass(slots=True)
class ReadStats:
    """Bytes read and seconds spent, summed over layers."""

    bytes_read: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)


class KVSource(Protocol):
    """Reads one layer's un-rotated keys and values `[kv_heads, tokens, head_dim]` of several segments."""

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]: ...


@dataclass(frozen=True, slots=True)
class StoreSource:
    """Records of a store; every one is verified against its digest, its shape and the wanted level."""

    store: Store
    shape: tuple[int, int]  # kv_heads, head_dim

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        started = time.perf_counter()
        found = self._records(segments, layer)
        read = time.perf_counter()
        out = []
        for segment, record in zip(segments, found, strict=True):
            if record is None or isinstance(record, DamagedError):
                raise RecordMissing(segment, "not stored" if record is None else f"damaged: {record.message}")
            header, payload = record
            shape = (header.kv_heads, header.tokens, header.head_dim_k)
            if shape != (self.shape[0], len(segment.ids), self.shape[1]):
                raise RecordMissing(segment, f"stored shape {shape} does not fit")
            try:
                out.append(CODECS[header.level].decode(payload, shape, header.dtype))
            except DamagedError as error:
                raise RecordMissing(segment, f"damaged: {error.message}") from error
            stats.bytes_read += len(payload)
        stats.read_s += read - started
        stats.decode_s += time.perf_counter() - read
        return out

    def _records(self, segments: Sequence[Segment], layer: int) -> list[KVRead | DamagedError | None]:
        levels = {segment.source.level for segment in segments}
        found: dict[int, KVRead | DamagedError | None] = {}
        for level in levels:
            wanted = [s for s in segments if s.source.level == level]
            records = self.store.read_layer([s.source.chunk_id for s in wanted], level or "raw", layer)
            found.update({s.start: record for s, record in zip(wanted, records, strict=True)})
        return [found[segment.start] for segment in segments]


@dataclass(frozen=True, slots=True)
class MemorySource:
    """Chunk KVs held in memory, by chunk id (the gate, tests, a chunk just computed)."""

    chunks: dict[bytes, ChunkKV]

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        found = [self.chunks[segment.source.chunk_id] for segment in segments]
        return [(chunk.keys[layer], chunk.values[layer]) for chunk in found]
