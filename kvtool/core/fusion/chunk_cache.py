"""Cache decoded chunks in memory, so that what several questions use is read once; least recently used goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from kvtool.core.codec.base import LayerKV
from kvtool.core.fusion.plan import Segment
from kvtool.core.fusion.source import KVSource, ReadStats

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder

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
