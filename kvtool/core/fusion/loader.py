"""Load layers ahead: read, decode and rotate them into the prompt's buffers while one computes.

On the CPU they are placed at once, on a GPU through pinned memory by a stream of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import torch

from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.fusion.chunk_cache import ChunkCache
from kvtool.core.fusion.cuda_placing import CudaPlacing
from kvtool.core.fusion.placing import Placing, Turning
from kvtool.core.fusion.plan import Segment
from kvtool.core.fusion.source import KVSource, ReadStats, RecordMissing
from kvtool.core.kernels.rope import RopeTables
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.preemption import run_pending
from kvtool.core.model.prompt_cache import PromptCache

_MOST_WORKERS = 4
_CORES_A_WORKER = 4  # the others compute
_LOOKS = 0.02  # seconds between two looks at what is waited for
_ENVELOPE_BYTES = 256  # at most, around a record's payload, what aligns it, and its line in the table of a layer


def default_workers() -> int:
    """Threads that load; each holds one layer's records at a time."""
    return max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // _CORES_A_WORKER))


class Loader:
    """Fills a prompt cache layer by layer in threads of its own.

    Memory is bounded by one layer's records for each thread: buffers are preallocated for the whole prompt, and a
    layer's bytes are dropped when they stand there. Every key is rotated once, in the buffer, to its absolute position.
    A layer's records are asked for in the order of their chunks' relevance.

    Parameters
    ----------
    read : the segments that are read, of each layer.
    """

    def __init__(
        self,
        decoder: Decoder,
        read: Sequence[Sequence[Segment]],
        cache: PromptCache,
        source: KVSource,
        timeline: Timeline | None = None,
        workers: int | None = None,
        patience: float | None = None,
    ) -> None:
        self.waited_s = 0.0
        self._decoder, self._cache, self._source = decoder, cache, source
        self._read = [sorted(segments, key=lambda segment: -segment.source.relevance) for segments in read]
        self._segments = max(self._read, key=len)
        self._timeline, self._patience = timeline, patience
        self._ready = [threading.Event() for _ in range(decoder.stored_layers)]
        self._placed: dict[int, tuple[Placing, int]] = {}
        self._error: BaseException | None = None
        self._stop = self._given_up = False
        self._left: Iterator[int] = iter(range(decoder.stored_layers))
        self._turn, self._making = threading.Lock(), threading.Lock()
        self._made: RopeTables | None = None
        count = min(workers or default_workers(), decoder.stored_layers) if self._segments else 1
        self._turning = self._shared() if decoder.device.startswith("cuda") and self._segments else None
        layers = _layers_of(self._read)
        self._workers = [_Worker(_placing_for(decoder, self._segments), layers) for _ in range(count)]
        names = ["kvtool-loader", *(f"kvtool-loader-{number}" for number in range(1, count))]
        self._threads = [
            threading.Thread(target=self._run, args=(worker,), name=name, daemon=True)
            for worker, name in zip(self._workers, names, strict=True)
        ]

    def __enter__(self) -> Loader:
        if self._is_held():
            return self
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
            for placing, mark in self._placed.values():  # whoever waits for the computing lets go of what was read
                placing.wait(mark)

    @property
    def stats(self) -> ReadStats:
        """What all threads have read so far."""
        return ReadStats(
            bytes_read=sum(worker.stats.bytes_read for worker in self._workers),
            read_s=sum(worker.stats.read_s for worker in self._workers),
            decode_s=sum(worker.stats.decode_s for worker in self._workers),
        )

    def placing_s(self) -> tuple[float, float]:
        """Seconds of copying into the buffers, and of rotating keys."""
        spent = [worker.placing.seconds() for worker in self._workers]
        return sum(upload for upload, _ in spent), sum(rotate for _, rotate in spent)

    def wait(self, layer: int) -> None:
        """Return when `layer` stands in the buffers; raise what went wrong if it never will."""
        if not self._ready[layer].is_set():
            started = time.perf_counter()
            while not self._ready[layer].wait(_LOOKS):
                run_pending()
                self._give_up_slow()
            self.waited_s += add_span(self._timeline, "wait", started, layer=layer)
        if self._error is not None:
            raise self._error
        if layer in self._placed:
            placing, mark = self._placed.pop(layer)
            placing.wait(mark)

    def _give_up_slow(self) -> None:
        """Raise if a record has been read for longer than there is patience; decoding may take its time."""
        now = time.perf_counter()
        for worker in self._workers:
            reading = worker.stats.reading
            if self._patience is not None and reading is not None and now - reading[1] >= self._patience:
                raise RecordMissing(reading[0], f"slow: not read within {self._patience:g} s", stored=True)

    def _run(self, worker: _Worker) -> None:
        try:
            with torch.inference_mode(), worker.placing.at_work():
                turning = self._turning or Turning(self._decoder.rotary, self.table)
                while not self._stop and self._error is None and (layer := self._next()) is not None:
                    self._load(layer, turning, worker)
                    self._ready[layer].set()
        except BaseException as error:  # handed to the thread that waits
            self._error = error
            for ready in self._ready:
                ready.set()
        if self._given_up:
            worker.placing.finish()

    @torch.inference_mode()
    def _is_held(self) -> bool:
        """Place all layers here and now where they are held on the device: a thread would only take turns with this
        one, for work that is over before the first layer has computed."""
        if self._turning is None or not self._turning.in_one_launch or not isinstance(self._source, ChunkCache):
            return False
        even = all(len(segments) == len(self._segments) for segments in self._read)
        layers = self._source.whole(self._segments, len(self._ready)) if even else None
        placing = self._workers[0].placing
        if layers is None or not isinstance(placing, CudaPlacing):
            return False
        started = time.perf_counter()
        if not placing.place_held(self._segments, layers, self._cache.buffers, self._turning):
            return False
        add_span(self._timeline, "place", started)
        for ready in self._ready:
            ready.set()
        return True

    def _next(self) -> int | None:
        with self._turn:
            return next(self._left, None)

    @torch.inference_mode()
    def _shared(self) -> Turning:
        """For all threads, in the stream of the computing, for which those of the threads wait at first: on a GPU each
        of its operations would cost every thread what it costs one. What is tried once is tried here, too."""
        return Turning(self._decoder.rotary, self.table, self._decoder.rotary.by_kernel)

    @property
    def table(self) -> RopeTables:
        """Of the positions of all places up to the last one that is read; made once, by whoever needs it first."""
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

    def _load(self, layer: int, turning: Turning, worker: _Worker) -> None:
        segments = self._read[layer]
        if not segments:
            return
        started = time.perf_counter()
        layers = self._source.read(segments, layer, worker.stats)
        add_span(self._timeline, "read and decode", started, layer=layer)
        if self._stop:
            return
        started = time.perf_counter()
        mark = worker.placing.place(segments, layers, self._cache.buffers[layer], turning, layer)
        self._placed[layer] = worker.placing, mark
        add_span(self._timeline, "upload and rotate", started, layer=layer)


class _Worker:
    """What one loading thread has to itself."""

    def __init__(self, placing: Placing, layers: Mapping[int, Sequence[int]]) -> None:
        self.placing = placing
        self.stats = ReadStats(room=placing.room, layers=layers)


def _layers_of(read: Sequence[Sequence[Segment]]) -> dict[int, list[int]]:
    """By the start of a segment, the layers that are read of it."""
    layers: dict[int, list[int]] = {}
    for layer, segments in enumerate(read):
        for segment in segments:
            layers.setdefault(segment.start, []).append(layer)
    return layers


def _placing_for(decoder: Decoder, segments: Sequence[Segment]) -> Placing:
    if not decoder.device.startswith("cuda"):
        return Placing()
    tokens = sum(segment.stop - segment.start for segment in segments)
    widest = max(shape.numbers for shape in decoder.shapes)
    layer_bytes = widest * decoder.kv_dtype.itemsize * tokens + _ENVELOPE_BYTES * len(segments)
    return CudaPlacing(torch.cuda.current_stream(decoder.device), layer_bytes)
