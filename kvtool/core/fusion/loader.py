"""Loads layers ahead of the compute: read, decode and rotate them into the prompt's buffers. A CPU places records at
once, a GPU through pinned memory, in a separate stream."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.fusion.placing import CudaPlacing, KeyRotation, Placing
from kvtool.core.fusion.plan import Segment
from kvtool.core.fusion.source import ChunkCache, KVSource, ReadStats, RecordMissing
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache

_MOST_WORKERS = 4
_CORES_A_WORKER = 4  # the rest compute
_LOOKS = 0.02  # seconds between two looks at a slow record
_ENVELOPE_BYTES = 256  # at most, around a record's payload: header, alignment, and its line in a layer's table


def default_workers() -> int:
    return max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // _CORES_A_WORKER))


class Loader:
    """Fills a prompt cache layer by layer in its own threads; each holds one layer's records at a time. Every key is
    rotated once, to its absolute position. Records are read in the order of their chunks' relevance. `is_placed`: all
    layers were in the buffers as soon as it was entered."""

    def __init__(
        self,
        decoder: Decoder,
        segments: Sequence[Segment],
        cache: PromptCache,
        source: KVSource,
        timeline: Timeline | None = None,
        workers: int | None = None,
        patience: float | None = None,
    ) -> None:
        self.waited_s, self.is_placed = 0.0, False
        self._decoder, self._cache, self._source = decoder, cache, source
        self._segments = sorted(segments, key=lambda segment: -segment.source.relevance)
        self._timeline, self._patience = timeline, patience
        self._ready = [threading.Event() for _ in range(decoder.stored_layers)]
        self._placed: dict[int, tuple[Placing, int]] = {}
        self._error: BaseException | None = None
        self._stop = self._given_up = False
        self._left: Iterator[int] = iter(range(decoder.stored_layers))
        self._turn, self._making = threading.Lock(), threading.Lock()
        self._made: RopeTables | None = None
        count = min(workers or default_workers(), decoder.stored_layers) if self._segments else 1
        self._rotation = self._shared() if decoder.device.startswith("cuda") and self._segments else None
        self._workers = [_Worker(_placing_for(decoder, self._segments)) for _ in range(count)]
        names = ["kvtool-loader", *(f"kvtool-loader-{number}" for number in range(1, count))]
        self._threads = [
            threading.Thread(target=self._run, args=(worker,), name=name, daemon=True)
            for worker, name in zip(self._workers, names, strict=True)
        ]

    def __enter__(self) -> Loader:
        self.is_placed = not self._segments or self._place_held()
        if self.is_placed:
            self._set_ready()
        else:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop = True
        self._given_up = error is not None
        # A thread in the middle of a slow read ends after it; the buffers it fills are given up.
        slow = isinstance(error, RecordMissing) and error.stored
        for thread, worker in zip(self._threads, self._workers, strict=True):
            if not slow and thread.ident is not None:
                thread.join()
            if self._given_up and not thread.is_alive():
                worker.placing.finish()
        if not self._given_up:
            for placing, mark in self._placed.values():  # then nothing that was read is needed any more
                placing.wait(mark)

    @property
    def stats(self) -> ReadStats:
        return ReadStats(
            bytes_read=sum(worker.stats.bytes_read for worker in self._workers),
            read_s=sum(worker.stats.read_s for worker in self._workers),
            decode_s=sum(worker.stats.decode_s for worker in self._workers),
        )

    def placing_s(self) -> tuple[float, float]:
        spent = [worker.placing.seconds() for worker in self._workers]
        return sum(upload for upload, _ in spent), sum(rotate for _, rotate in spent)

    def wait(self, layer: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until `layer` is in the buffers, and call `meanwhile` now and then. Raises a loading thread's error."""
        if not self._ready[layer].is_set():
            started = time.perf_counter()
            while not self._ready[layer].wait(_LOOKS):
                meanwhile()
                self._give_up_slow()
            self.waited_s += add_span(self._timeline, "wait", started, layer=layer)
        if self._error is not None:
            raise self._error
        if layer in self._placed:
            placing, mark = self._placed.pop(layer)
            placing.wait(mark)

    def _give_up_slow(self) -> None:
        """Raise RecordMissing if reading a record exceeds the patience; decoding may take longer."""
        now = time.perf_counter()
        for worker in self._workers:
            reading = worker.stats.reading
            if self._patience is not None and reading is not None and now - reading[1] >= self._patience:
                raise RecordMissing(reading[0], f"slow: not read within {self._patience:g} s", stored=True)

    def _run(self, worker: _Worker) -> None:
        try:
            with torch.inference_mode(), worker.placing.at_work():
                rotation = self._rotation or KeyRotation(self._decoder.rotary, self.table)
                while not self._stop and self._error is None and (layer := self._next()) is not None:
                    self._load(layer, rotation, worker)
                    self._ready[layer].set()
        except BaseException as error:  # handed to the thread that waits
            self._error = error
            self._set_ready()
        if self._given_up:
            worker.placing.finish()

    @torch.inference_mode()
    def _place_held(self) -> bool:
        """Place all layers at once if the chunk cache holds them on the device; return whether it did. A thread would
        only compete with this one, for work that ends before the first layer has computed."""
        if self._rotation is None or not self._rotation.in_one_launch or not isinstance(self._source, ChunkCache):
            return False
        layers = self._source.whole(self._segments, len(self._ready))
        placing = self._workers[0].placing
        if layers is None or not isinstance(placing, CudaPlacing):
            return False
        started = time.perf_counter()
        layers = [[_part(*pair) for pair in zip(self._segments, kvs, strict=True)] for kvs in layers]
        if not placing.place_held(self._segments, layers, self._cache.buffers, self._rotation):
            return False
        add_span(self._timeline, "place", started)
        return True

    def _set_ready(self) -> None:
        for ready in self._ready:
            ready.set()

    def _next(self) -> int | None:
        with self._turn:
            return next(self._left, None)

    @torch.inference_mode()
    def _shared(self) -> KeyRotation:
        """Make one rotation for all threads of a GPU: each of its launches would cost every thread as much again. The
        compute stream makes it, and the streams of the threads wait for that first."""
        return KeyRotation(self._decoder.rotary, self.table, self._decoder.rotary.by_kernel)

    @property
    def table(self) -> RopeTables:
        with self._making:
            if self._made is None:
                self._made = self._table()
            return self._made

    def _table(self) -> RopeTables:
        stop, device = max((segment.stop for segment in self._segments), default=0), self._decoder.device
        moved = [one for one in self._segments if one.position != one.start or one.kept is not None]
        if not moved:
            return self._decoder.rotary.table(torch.arange(stop, device=device))
        positions = torch.arange(stop)
        for segment in moved:
            positions[segment.start : segment.stop] = torch.tensor(segment.positions)
        return self._decoder.rotary.table(positions.to(device))

    def _load(self, layer: int, rotation: KeyRotation, worker: _Worker) -> None:
        segments, started = self._segments, time.perf_counter()
        read = self._source.read(segments, layer, worker.stats)
        layers = [_part(segment, kv) for segment, kv in zip(segments, read, strict=True)]
        add_span(self._timeline, "read and decode", started, layer=layer)
        if self._stop:
            return
        started = time.perf_counter()
        mark = worker.placing.place(segments, layers, self._cache.buffers[layer], rotation, layer)
        self._placed[layer] = worker.placing, mark
        add_span(self._timeline, "upload and rotate", started, layer=layer)


class _Worker:
    def __init__(self, placing: Placing) -> None:
        self.placing = placing
        self.stats = ReadStats(room=placing.room)


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
        return Placing(layer_bytes)
    return CudaPlacing(torch.cuda.current_stream(decoder.device), layer_bytes)
