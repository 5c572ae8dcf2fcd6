"""Layer l+1 is read, decoded and rotated into the prompt's buffers while layer l computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType

import torch

from kvtool.core.fusion.plan import Segment
from kvtool.core.fusion.source import KVSource, ReadStats
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.model.rotary import Table


class Loader:
    """Fills a prompt cache layer by layer in a thread of its own.

    Memory is bounded by one layer's records: buffers are preallocated for the whole prompt, and each layer's bytes are
    dropped when they stand there. Every key is rotated once, in the buffer, to its absolute position.
    """

    def __init__(self, decoder: Decoder, segments: Sequence[Segment], cache: PromptCache, source: KVSource) -> None:
        self.stats = ReadStats()
        self.upload_s = self.rotate_s = self.waited_s = 0.0
        self._decoder, self._segments, self._cache, self._source = decoder, list(segments), cache, source
        self._ready = [threading.Event() for _ in decoder.layers]
        self._error: BaseException | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="kvtool-loader", daemon=True)

    def __enter__(self) -> Loader:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop = True
        self._thread.join()

    def wait(self, layer: int) -> None:
        """Return when `layer` stands in the buffers; raise what went wrong if it never will."""
        started = time.perf_counter()
        self._ready[layer].wait()
        self.waited_s += time.perf_counter() - started
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                table = self._table()
                for layer, ready in enumerate(self._ready):
                    if self._stop:
                        break
                    self._load(layer, table)
                    ready.set()
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        for ready in self._ready:
            ready.set()

    def _table(self) -> Table:
        stop = max((segment.stop for segment in self._segments), default=0)
        return self._decoder.rotary.table(torch.arange(stop, device=self._decoder.device))

    def _load(self, layer: int, table: Table) -> None:
        if not self._segments:
            return
        buffer = self._cache.buffers[layer]
        layers = self._source.read(self._segments, layer, self.stats)
        started = time.perf_counter()
        for segment, (keys, values) in zip(self._segments, layers, strict=True):
            buffer.keys[0, :, segment.start : segment.stop].copy_(keys)
            buffer.values[0, :, segment.start : segment.stop].copy_(values)
        uploaded = time.perf_counter()
        for start, stop in _runs(self._segments):
            span = buffer.keys[:, :, start:stop]
            span.copy_(self._decoder.rotary.rotate(span, table[start:stop], layer))
        self.upload_s += uploaded - started
        self.rotate_s += time.perf_counter() - uploaded


def _runs(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Neighbouring segments as one span each, so that a layer rotates in few calls."""
    runs: list[tuple[int, int]] = []
    for segment in segments:
        if runs and runs[-1][1] == segment.start:
            runs[-1] = (runs[-1][0], segment.stop)
        else:
            runs.append((segment.start, segment.stop))
    return runs
