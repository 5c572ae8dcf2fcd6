"""What is done beside the fetching, in one thread: what has come is decoded, what will not come is computed."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvtool.core.codec.levels import RAW
from kvtool.core.errors import KvtoolError
from kvtool.core.fusion.hot import HotSource
from kvtool.core.fusion.plan import Segment
from kvtool.core.fusion.source import ReadStats, RecordMissing

if TYPE_CHECKING:
    from kvtool.core.model.prefill import ChunkKV

COMPUTED = RAW  # the level of what was computed from its text: it loses nothing

# What ingest would store of a segment; None: it cannot be computed alone, or the second argument said to stop.
Prefill = Callable[[Segment, Callable[[], bool]], "ChunkKV | None"]


@dataclass(slots=True)
class _Ahead:
    """What has been decoded, or begun to be."""

    segment: Segment
    stats: ReadStats = field(default_factory=ReadStats)


class Ahead:
    """Decodes and computes into the memory that the loader then reads, while something is on its way.

    Work that is saved, and never waited for: a chunk that is refined meanwhile is begun anew, what is not decoded at
    the end the loader decodes layer by layer beside the computing, several chunks together, and what is not computed is
    computed in its place. The chunk that came last is decoded first: the others may be refined sooner. Chunks are
    computed from their text where there is nothing to decode.
    """

    def __init__(self, source: HotSource, layers: int, prefill: Prefill) -> None:
        self._source, self._layers, self._prefill = source, layers, prefill
        self._changed = threading.Condition()
        self._waiting: dict[int, Segment] = {}  # by number in the prompt; the last one came last
        self._texts: dict[int, Segment] = {}
        self._known: set[int] = set()  # of which the text was asked for
        self._computed: set[int] = set()
        self._ahead: dict[int, _Ahead] = {}
        self._stopped = False
        self._begun: set[str | None] = set()
        self._taken: dict[str | None, tuple[float, float]] = {}  # by level: seconds, tokens
        self._thread: threading.Thread | None = None

    @property
    def computed(self) -> frozenset[int]:
        """Chunks that were computed whole before they came; they are held at the level `COMPUTED`."""
        return frozenset(self._computed)

    def seconds(self, tokens: int, level: str) -> float:
        """What decoding at this level has taken beside the fetching; where nothing is known of it, as the slowest.

        The first chunk of a level does not count, since it waits for tables and compilers.
        """
        with self._changed:
            rates = {name: took / decoded for name, (took, decoded) in self._taken.items()}
        return tokens * rates.get(level, max(rates.values(), default=0.0))

    def put(self, number: int, segment: Segment, level: str) -> None:
        """Decode a chunk at a level that is there now."""
        with self._changed:
            if number in self._computed:
                return
            self._texts.pop(number, None)
            self._waiting.pop(number, None)
            self._waiting[number] = replace(segment, source=replace(segment.source, level=level))
            self._begin()

    def compute(self, number: int, segment: Segment) -> None:
        """Compute a chunk that is not expected to come."""
        with self._changed:
            if number not in self._known:
                self._known.add(number)
                self._texts[number] = segment
                self._begin()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtool-ahead", daemon=True)
            self._thread.start()
        self._changed.notify()

    def finish(self) -> None:
        """End after the layer that is being decoded or computed."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def bytes_read(self, levels: Mapping[int, str | None]) -> int:
        """Bytes of the records that were decoded at the level at which their chunk stands in the end."""
        return sum(
            begun.stats.bytes_read
            for number, begun in self._ahead.items()
            if begun.segment.source.level == levels[number]
        )

    def _run(self) -> None:
        import torch

        with torch.inference_mode():
            while (work := self._next()) is not None:
                work()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._waiting or self._texts)
            if self._stopped:
                return None
            if self._waiting:
                return functools.partial(self._decode, *self._waiting.popitem())
            number = next(iter(self._texts))
            return functools.partial(self._compute, number, self._texts.pop(number))

    def _compute(self, number: int, segment: Segment) -> None:
        try:
            kv = self._prefill(segment, lambda: not self._stopped and number not in self._waiting)
        except KvtoolError:
            return  # whoever computes it in its place meets it again
        if kv is None:
            return
        held = replace(segment, source=replace(segment.source, level=COMPUTED))
        self._source.hold(held, kv.layers)
        if self._source.holds(held, self._layers):  # a batch's memory may be smaller than a chunk
            with self._changed:
                self._computed.add(number)
                self._waiting.pop(number, None)

    def _decode(self, number: int, segment: Segment) -> None:
        if number in self._ahead:
            self._source.forget(self._ahead[number].segment)
        begun = self._ahead[number] = _Ahead(segment)
        started, done = time.perf_counter(), 0
        try:
            while done < self._layers and not self._stopped and number not in self._waiting:
                self._source.read([segment], done, begun.stats)
                done += 1
        except RecordMissing:
            return  # the loader meets it again, and makes it a hole
        if done and segment.source.level in self._begun:
            self._learn(segment, time.perf_counter() - started, done / self._layers)
        self._begun.add(segment.source.level)

    def _learn(self, segment: Segment, seconds: float, share: float) -> None:
        with self._changed:
            before = self._taken.get(segment.source.level, (0.0, 0.0))
            self._taken[segment.source.level] = before[0] + seconds, before[1] + share * len(segment.ids)
