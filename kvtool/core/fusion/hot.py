"""Chunks that several questions use are read and decoded once: a bounded memory of what was loaded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.plan import Segment
from kvtool.core.fusion.source import KVSource, ReadStats

Key = tuple[bytes, str]  # chunk id, level
Mark = Callable[[bytes, str], bytes | None]


class HotSource:
    """Keeps decoded, un-rotated layers of the chunks used last, as the model's own numbers.

    Records were verified when they were read; whether they still stand on disk is asked by :meth:`recheck`. Threads
    may read at once.

    Parameters
    ----------
    limit : bytes held at most; the chunk used longest ago goes first, with all its layers.
    mark : what tells a chunk's records of a level from others of the same level; None: there are none.
    """

    def __init__(self, inner: KVSource, limit: int, mark: Mark = lambda chunk_id, level: None) -> None:
        self._inner = inner
        self._limit = limit
        self._mark = mark
        self._marks: dict[Key, bytes | None] = {}
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

    def read(self, segments: Sequence[Segment], layer: int, stats: ReadStats) -> list[LayerKV]:
        """One layer's keys and values of several segments (KVSource): from memory, else from the source behind it."""
        layers = {segment.start: self._get(segment, layer) for segment in segments}
        missing = [segment for segment in segments if layers[segment.start] is None]
        if missing:
            for segment, kv in zip(missing, self._inner.read(missing, layer, stats), strict=True):
                layers[segment.start] = kv
                self._keep(segment, layer, kv, self._mark(*_key(segment)))
        return [kv for kv in layers.values() if kv is not None]

    def hold(self, segment: Segment, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold KV that came from elsewhere, each `[layers, kv_heads, tokens, head_dim]`, un-rotated."""
        for layer in range(len(keys)):
            self._keep(segment, layer, (keys[layer], values[layer]), None)

    def forget(self, segment: Segment) -> None:
        """Hold nothing of it any more."""
        with self._lock:
            self._drop(_key(segment))

    def recheck(self) -> None:
        """Let go of what has other records now, or none. What came from elsewhere has none at first."""
        with self._lock:
            for key in list(self._held):
                now, before = self._mark(*key), self._marks.get(key)
                if before is None:
                    self._marks[key] = now
                elif now != before:
                    self._drop(key)

    def _drop(self, key: Key) -> None:
        self._marks.pop(key, None)
        self._bytes -= sum(map(_size, self._held.pop(key, {}).values()))

    def _get(self, segment: Segment, layer: int) -> LayerKV | None:
        with self._lock:
            key = _key(segment)
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            kv = self._held[key].get(layer)
            for side in kv or ():
                if side.is_cuda:  # it may be let go of while this stream still reads it
                    side.record_stream(torch.cuda.current_stream(side.device))
            return kv

    def _keep(self, segment: Segment, layer: int, kv: LayerKV, mark: bytes | None) -> None:
        # A view would hold all that was decoded with it.
        copies = kv[0].clone(), kv[1].clone()
        if copies[0].is_cuda:  # the next question reads it from another stream
            torch.cuda.current_stream(copies[0].device).synchronize()
        with self._lock:
            layers = self._held.setdefault(_key(segment), {})
            if layer not in layers:
                layers[layer] = copies
                self._bytes += _size(copies)
                self._marks.setdefault(_key(segment), mark)
            while self._bytes > self._limit:
                self._drop(next(iter(self._held)))


class HotChunks:
    """Which chunks a memory of `limit` bytes holds after the questions so far: those used last.

    Counted a question at a time, so that it does not depend on which loader thread was faster, as what `HotSource`
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


def _key(segment: Segment) -> Key:
    return segment.source.chunk_id, segment.source.level or ""


def _size(kv: LayerKV) -> int:
    return kv[0].nbytes + kv[1].nbytes
