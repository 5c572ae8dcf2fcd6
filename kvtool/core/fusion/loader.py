"""Loads layers ahead of the compute: read, decode and rotate them into the prompt's buffers. A CPU places records at
once, a GPU through pinned memory, in a separate stream."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from kvtool.core.cache.record import Allocator, aligned
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded, LayerKV, Profiles, no_profiles
from kvtool.core.codec.decode import decodes_there
from kvtool.core.codec.levels import RAW, level_of
from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.errors import DamagedError
from kvtool.core.fusion.placing import CudaPlacing, Placing, fits
from kvtool.core.fusion.plan import Segment
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.records.read import Unusable, read_layer, stored_rows, stored_shape

if TYPE_CHECKING:
    from kvtool.core.cache.chunks import ChunkReader
    from kvtool.core.model.prefill import ChunkKV

_MOST_WORKERS = 4
_CORES_A_WORKER = 4  # the rest compute
_LOOKS = 0.02  # seconds between two looks at a slow record
_ENVELOPE_BYTES = 256  # at most, around a record's payload: header, alignment, and its line in a layer's table


def default_workers() -> int:
    return max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // _CORES_A_WORKER))


@torch.inference_mode()
def open_loader(
    decoder: Decoder,
    segments: Sequence[Segment],
    cache: PromptCache,
    source: KVSource,
    timeline: Timeline | None = None,
    workers: int | None = None,
    patience: float | None = None,
) -> Loader:
    """Make the loader of a prompt's segments, a context manager: without threads if the source holds all layers on the
    device. `workers`: number of threads. `patience`: seconds to wait for one record; None: no limit."""
    if not segments:
        return Loader(decoder, segments, cache)
    layers = source.whole(segments, decoder.stored_layers)
    if layers is not None and decoder.rotary.by_kernel and all(map(fits, layers, cache.buffers)):
        return HeldLoader(decoder, segments, cache, layers, timeline)
    return DiskLoader(decoder, segments, cache, source, timeline, workers or default_workers(), patience)


def positions_of(segments: Sequence[Segment], device: str) -> torch.Tensor:
    """The position of each place up to the last one of `segments`, int64 `[places]`."""
    positions = torch.arange(max((segment.stop for segment in segments), default=0), device=device)
    for segment in segments:
        if segment.position != segment.start or segment.placed_rows is not None:
            positions[segment.start : segment.stop] = torch.tensor(segment.positions)
    return positions


class Loader:
    """Fills a prompt cache layer by layer; every key is rotated once, to its absolute position. This one has nothing to
    load. `waited_s`: seconds that the compute waited."""

    waited_s = 0.0

    def __init__(self, decoder: Decoder, segments: Sequence[Segment], cache: PromptCache) -> None:
        self.decoder, self.segments, self.cache = decoder, segments, cache
        self._lock = threading.Lock()
        self._placings: Sequence[Placing] = ()
        self._stats: Sequence[ReadStats] = ()

    @property
    def table(self) -> RopeTables:
        """RoPE of all places up to the last loaded one, made at the first use."""
        with self._lock:
            return self._table

    @cached_property
    def _table(self) -> RopeTables:
        return self.decoder.rotary.table(positions_of(self.segments, self.decoder.device))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            for placing in self._placings:
                placing.finish()

    def wait(self, layer: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until `layer` is in the buffers, and call `meanwhile` now and then. Raises a loading thread's error."""

    @property
    def stats(self) -> ReadStats:
        return ReadStats(
            bytes_read=sum(stats.bytes_read for stats in self._stats),
            read_s=sum(stats.read_s for stats in self._stats),
            decode_s=sum(stats.decode_s for stats in self._stats),
        )

    def placing_s(self) -> tuple[float, float]:
        """Seconds of uploading and of rotating, of all threads together."""
        seconds = [placing.seconds() for placing in self._placings]
        return sum(upload for upload, _ in seconds), sum(rotate for _, rotate in seconds)


class HeldLoader(Loader):
    """Places layers that are held on a GPU as soon as it is made. A thread would only compete with this one, for work
    that ends before the first layer has computed."""

    def __init__(
        self,
        decoder: Decoder,
        segments: Sequence[Segment],
        cache: PromptCache,
        layers: Sequence[Sequence[LayerKV]],
        timeline: Timeline | None,
    ) -> None:
        super().__init__(decoder, segments, cache)
        started = time.perf_counter()
        placing = CudaPlacing(decoder.rotary, 0, torch.cuda.current_stream(decoder.device))
        self._placings = (placing,)
        parts = [[*map(_part, segments, kvs)] for kvs in layers]
        placing.place_all(segments, parts, cache.buffers, self.table)
        add_span(timeline, "place", started)


class DiskLoader(Loader):
    """Reads records in threads, each of which holds one layer's records at a time, in the order of their chunks'
    relevance."""

    def __init__(
        self,
        decoder: Decoder,
        segments: Sequence[Segment],
        cache: PromptCache,
        source: KVSource,
        timeline: Timeline | None,
        workers: int,
        patience: float | None,
    ) -> None:
        super().__init__(decoder, sorted(segments, key=lambda segment: -segment.source.relevance), cache)
        workers = min(workers, decoder.stored_layers)
        if decoder.device.startswith("cuda"):
            _ = self.table  # made by the compute stream, for which the streams of the threads wait
        self._placings = [_placing_for(decoder, segments) for _ in range(workers)]
        self._stats = [ReadStats(allocate=placing.allocate) for placing in self._placings]
        self._source, self._timeline, self._patience = source, timeline, patience
        self._layers = iter(range(decoder.stored_layers))  # which the threads share
        self._ready = [threading.Event() for _ in range(decoder.stored_layers)]
        self._placed: dict[int, torch.cuda.Event] = {}
        self._error: BaseException | None = None
        self._stopped = self._given_up = False
        names = ["kvtool-loader", *(f"kvtool-loader-{number}" for number in range(1, workers))]
        self._threads = [
            threading.Thread(target=self._run, args=worker, name=name, daemon=True)
            for *worker, name in zip(self._placings, self._stats, names, strict=True)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopped = True
        self._given_up = error is not None
        # A thread in the middle of a slow read ends after it; the buffers it fills are given up.
        slow = isinstance(error, RecordMissing) and error.stored
        for thread, placing in zip(self._threads, self._placings, strict=True):
            if not slow:
                thread.join()
            if self._given_up and not thread.is_alive():
                placing.finish()
        if not self._given_up:
            for event in self._placed.values():  # then nothing that was read is needed any more
                event.wait()

    def wait(self, layer: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        if not self._ready[layer].is_set():
            started = time.perf_counter()
            while not self._ready[layer].wait(_LOOKS):
                meanwhile()
                self._give_up_slow()
            self.waited_s += add_span(self._timeline, "wait", started, layer=layer)
        if self._error is not None:
            raise self._error
        if (event := self._placed.pop(layer, None)) is not None:
            event.wait()

    def _give_up_slow(self) -> None:
        """Raise RecordMissing if reading a record exceeds the patience; decoding may take longer."""
        now = time.perf_counter()
        for reading in (stats.reading for stats in self._stats):
            if self._patience is not None and reading is not None and now - reading[1] >= self._patience:
                raise RecordMissing(reading[0], f"slow: not read within {self._patience:g} s", stored=True)

    def _run(self, placing: Placing, stats: ReadStats) -> None:
        try:
            with torch.inference_mode(), placing.at_work():
                for layer in self._layers:
                    self.load(layer, placing, stats)
                    self._ready[layer].set()
                    if self._stopped or self._error is not None:
                        break
        except BaseException as error:  # handed to the thread that waits
            self._error = error
            for ready in self._ready:
                ready.set()
        if self._given_up:
            placing.finish()

    def load(self, layer: int, placing: Placing, stats: ReadStats) -> None:
        """Read one layer and place it, in a thread."""
        started = time.perf_counter()
        layers = [*map(_part, self.segments, self._source.read(self.segments, layer, stats))]
        add_span(self._timeline, "read and decode", started, layer=layer)
        if self._stopped:
            return
        started = time.perf_counter()
        event = placing.place(self.segments, layers, self.cache.buffers[layer], self.table, layer)
        if event is not None:
            self._placed[layer] = event
        add_span(self._timeline, "upload and rotate", started, layer=layer)


def _part(segment: Segment, kv: LayerKV) -> LayerKV:
    if (part := segment.source.part) is None:
        return kv
    keys, values = (side[:, part.first : part.stop].contiguous() for side in kv)
    return keys, values


def _placing_for(decoder: Decoder, segments: Sequence[Segment]) -> Placing:
    tokens = sum(segment.stop - segment.start for segment in segments)
    widest = max(shape.numbers for shape in decoder.shapes)
    layer_bytes = widest * decoder.kv_dtype.itemsize * tokens + _ENVELOPE_BYTES * len(segments)
    if not decoder.device.startswith("cuda"):
        return Placing(decoder.rotary, layer_bytes)
    compute = torch.cuda.current_stream(decoder.device)
    stream = torch.cuda.Stream(compute.device)
    stream.wait_stream(compute)
    return CudaPlacing(decoder.rotary, layer_bytes, stream)


# ---- where layers are read from ----


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

    def whole(self, segments: Sequence[Segment], layers: int) -> list[list[LayerKV]] | None:
        """All layers of some segments, by layer; None if not all are held on a GPU."""
        return None


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
