"""Layers ahead are read, decoded and rotated into the prompt's buffers while one computes.

On the CPU they are placed at once, on a GPU through pinned memory by a stream of its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeAlias

import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.common.timeline import Timeline, add_span
from kvtool.core.fusion.plan import Segment
from kvtool.core.fusion.source import KVSource, ReadStats, RecordMissing
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import BufferLayer, PromptCache
from kvtool.core.model.rotary import Copy, Table

# Keys to their places, each beginning at a prompt position, rotated to it; and what goes beside them as it is.
Rotate = Callable[[Sequence[tuple[Copy, int]], Sequence[Copy]], None]

_MOST_WORKERS = 4
_CORES_A_WORKER = 4  # the others compute


def default_workers() -> int:
    """Threads that load; each holds one layer's records at a time."""
    return max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // _CORES_A_WORKER))


class Loader:
    """Fills a prompt cache layer by layer in threads of its own.

    Memory is bounded by one layer's records for each thread: buffers are preallocated for the whole prompt, and a
    layer's bytes are dropped when they stand there. Every key is rotated once, in the buffer, to its absolute position.
    A layer's records are asked for in the order of their chunks' relevance.
    """

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
        self.waited_s = 0.0
        self._decoder, self._cache, self._source = decoder, cache, source
        self._segments = sorted(segments, key=lambda segment: -segment.source.relevance)
        self._timeline, self._patience = timeline, patience
        self._ready = [threading.Event() for _ in decoder.layers]
        self._placed: dict[int, tuple[Placing, int]] = {}
        self._error: BaseException | None = None
        self._stop = False
        self._left: Iterator[int] = iter(range(len(decoder.layers)))
        self._turn = threading.Lock()
        count = min(workers or default_workers(), len(decoder.layers)) if self._segments else 1
        self._workers = [_Worker(_placing_for(decoder.device)) for _ in range(count)]
        names = ["kvtool-loader", *(f"kvtool-loader-{number}" for number in range(1, count))]
        self._threads = [
            threading.Thread(target=self._run, args=(worker,), name=name, daemon=True)
            for worker, name in zip(self._workers, names, strict=True)
        ]

    def __enter__(self) -> Loader:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop = True
        if isinstance(error, RecordMissing) and error.stored:
            return  # a thread in the middle of a slow read ends after it; the buffers it fills are given up
        for thread in self._threads:
            thread.join()

    @property
    def stats(self) -> ReadStats:
        """What all threads have read so far."""
        return ReadStats(
            bytes_read=sum(worker.stats.bytes_read for worker in self._workers),
            read_s=sum(worker.stats.read_s for worker in self._workers),
            decode_s=sum(worker.stats.decode_s for worker in self._workers),
        )

    @property
    def upload_s(self) -> float:
        """Seconds of copying into the buffers."""
        return sum(worker.placing.seconds()[0] for worker in self._workers)

    @property
    def rotate_s(self) -> float:
        """Seconds of rotating keys."""
        return sum(worker.placing.seconds()[1] for worker in self._workers)

    def wait(self, layer: int) -> None:
        """Return when `layer` stands in the buffers; raise what went wrong if it never will."""
        if not self._ready[layer].is_set():
            started = time.perf_counter()
            while not self._ready[layer].wait(self._patience):
                self._give_up_slow()
            self.waited_s += add_span(self._timeline, "wait", started, layer=layer)
        if self._error is not None:
            raise self._error
        if layer in self._placed:
            placing, mark = self._placed[layer]
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
            with torch.inference_mode():
                with worker.placing.at_work():  # else it would be made in a stream that nobody waits for
                    table = self._table()
                while not self._stop and self._error is None and (layer := self._next()) is not None:
                    self._load(layer, table, worker)
                    self._ready[layer].set()
        except BaseException as error:  # handed to the thread that waits
            self._error = error
            for ready in self._ready:
                ready.set()

    def _next(self) -> int | None:
        with self._turn:
            return next(self._left, None)

    def _table(self) -> Table:
        stop = max((segment.stop for segment in self._segments), default=0)
        return self._decoder.rotary.table(torch.arange(stop, device=self._decoder.device))

    def _load(self, layer: int, table: Table, worker: _Worker) -> None:
        if not self._segments:
            return
        started = time.perf_counter()
        with worker.placing.at_work():
            layers = self._source.read(self._segments, layer, worker.stats)
        add_span(self._timeline, "read and decode", started, layer=layer)
        if self._stop:
            return
        started = time.perf_counter()

        def rotate(turns: Sequence[tuple[Copy, int]], beside: Sequence[Copy]) -> None:
            placed = [(out, keys, table[start : start + out.shape[2]]) for (out, keys), start in turns]
            self._decoder.rotary.place(placed, beside, layer)

        buffer = self._cache.buffers[layer]
        self._placed[layer] = worker.placing, worker.placing.place(self._segments, layers, buffer, rotate)
        add_span(self._timeline, "upload and rotate", started, layer=layer)


class _Worker:
    """What one loading thread has to itself."""

    def __init__(self, placing: Placing) -> None:
        self.placing = placing
        self.stats = ReadStats()


def _placing_for(device: str) -> Placing:
    return CudaPlacing(torch.cuda.current_stream(device)) if device.startswith("cuda") else Placing()


_Span: TypeAlias = "tuple[torch.cuda.Event, torch.cuda.Event]"


def _elapsed_s(span: _Span) -> float:
    begun, ended = span
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


# ---- placing -------------------------------------------------------------------------------------------------------


class Placing:
    """Puts a layer's un-rotated keys and values into the prompt's buffers, and rotates the keys once.

    This one serves buffers in main memory. Each belongs to one thread.

    Attributes
    ----------
    upload_s, rotate_s : seconds that the thread has spent with both.
    """

    def __init__(self) -> None:
        self.upload_s = self.rotate_s = 0.0

    def seconds(self) -> tuple[float, float]:
        """What copying and rotating have taken."""
        return self.upload_s, self.rotate_s

    def at_work(self) -> AbstractContextManager[object]:
        """Within it, what the calling thread computes on a GPU is put where the placing itself works."""
        return contextlib.nullcontext()

    def place(self, segments: Sequence[Segment], layers: Sequence[LayerKV], buffer: BufferLayer, rotate: Rotate) -> int:
        """Place one layer.

        Returns
        -------
        A mark to give `wait`.
        """
        started, turning = time.perf_counter(), self.rotate_s
        with self.at_work():
            self._put(segments, self._brought(layers, buffer.keys.device), buffer, rotate)
            mark = self._mark()
        self.upload_s += time.perf_counter() - started - (self.rotate_s - turning)
        return mark

    def _put(self, segments: Sequence[Segment], layers: Sequence[LayerKV], buffer: BufferLayer, rotate: Rotate) -> None:
        """Rotated on their way, values beside them: all is read once and written once."""
        spans = [slice(segment.start, segment.stop) for segment in segments]
        turns = [
            ((buffer.keys[:, :, span], keys[None]), span.start) for span, (keys, _) in zip(spans, layers, strict=True)
        ]
        beside = [(buffer.values[:, :, span], values[None]) for span, (_, values) in zip(spans, layers, strict=True)]
        started = time.perf_counter()
        rotate(turns, beside)
        self.rotate_s += time.perf_counter() - started

    def wait(self, mark: int) -> None:
        """Let the calling thread's computations wait until what was placed is there."""

    def _brought(self, layers: Sequence[LayerKV], device: torch.device) -> Sequence[LayerKV]:
        """The layers where they can be copied from quickly."""
        return layers

    def _mark(self) -> int:
        return 0


class CudaPlacing(Placing):
    """Places into buffers on a GPU, by a stream of its own: from one pinned buffer of one layer's size, or from where a
    codec has decoded them.

    Parameters
    ----------
    compute : the stream in which the buffers were made and will be read.
    """

    def __init__(self, compute: torch.cuda.Stream) -> None:
        super().__init__()
        self._stream = torch.cuda.Stream(compute.device)
        self._stream.wait_stream(compute)
        self._pinned = torch.empty(0)
        self._copied = torch.cuda.Event()
        self._uploads: list[_Span] = []
        self._turns: list[_Span] = []
        self._placed: list[torch.cuda.Event] = []

    def seconds(self) -> tuple[float, float]:
        """Of the device, between events; that of the thread, which only asks for it, is its staging."""
        return self.upload_s + sum(map(_elapsed_s, self._uploads)), sum(map(_elapsed_s, self._turns))

    def at_work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def wait(self, mark: int) -> None:
        self._placed[mark].wait()

    def _put(self, segments: Sequence[Segment], layers: Sequence[LayerKV], buffer: BufferLayer, rotate: Rotate) -> None:
        """Keys are turned in their place, neighbouring segments as one span, so that a layer rotates in few calls."""
        runs: list[tuple[int, int]] = []
        for segment, (keys, values) in zip(segments, layers, strict=True):
            buffer.keys[0, :, segment.start : segment.stop].copy_(keys)
            buffer.values[0, :, segment.start : segment.stop].copy_(values)
            if runs and runs[-1][1] == segment.start:
                runs[-1] = (runs[-1][0], segment.stop)
            else:
                runs.append((segment.start, segment.stop))
        begun = self._timed()
        spans = [(buffer.keys[:, :, start:stop], start) for start, stop in runs]
        rotate([((span, span), start) for span, start in spans], [])
        self._turns.append((begun, self._timed()))

    def _timed(self) -> torch.cuda.Event:
        """A moment of the stream."""
        moment = torch.cuda.Event(enable_timing=True)
        moment.record(self._stream)
        return moment

    def _mark(self) -> int:
        done = torch.cuda.Event()
        done.record(self._stream)
        self._placed.append(done)
        return len(self._placed) - 1

    def _brought(self, layers: Sequence[LayerKV], device: torch.device) -> list[LayerKV]:
        """The layers on the device; those in main memory cross together."""
        here = [layer for layer in layers if not layer[0].is_cuda]
        if not here:
            return list(layers)
        self._copied.synchronize()  # the pinned buffer still held the layer before
        staged = self._stage(here)
        begun = self._timed()
        staged = staged.to(device, non_blocking=True)
        self._uploads.append((begun, self._timed()))
        self._copied.record(self._stream)
        sizes = [keys.shape[1] for keys, _ in here]
        crossed = iter(zip(*(side.split(sizes, 1) for side in staged), strict=True))
        return [layer if layer[0].is_cuda else next(crossed) for layer in layers]

    def _stage(self, layers: Sequence[LayerKV]) -> torch.Tensor:
        """All segments end to end in pinned memory, `[2, kv_heads, tokens, head_dim]`."""
        keys, _ = layers[0]
        tokens = sum(key.shape[1] for key, _ in layers)
        shape = (2, keys.shape[0], tokens, keys.shape[2])
        if self._pinned.shape != shape or self._pinned.dtype != keys.dtype:
            self._pinned = torch.empty(shape, dtype=keys.dtype, pin_memory=True)
        torch.cat([key for key, _ in layers], 1, out=self._pinned[0])
        torch.cat([value for _, value in layers], 1, out=self._pinned[1])
        return self._pinned
