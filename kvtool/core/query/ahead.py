"""Overlap of fetching and computing in one thread: decodes what arrived, computes what will not arrive."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvtool.core.codec.levels import RAW
from kvtool.core.fusion.plan import Segment
from kvtool.core.fusion.source import ChunkCache, ReadStats

if TYPE_CHECKING:
    from kvtool.core.model.prefill import ChunkKV

COMPUTED = RAW  # the level of what was computed from its text: it loses nothing

# What ingest would store of a segment; None: it cannot be computed alone, or the second argument said to stop.
Prefill = Callable[[Segment, Callable[[], bool]], "ChunkKV | None"]


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of computing a chunk, with its seconds, without the decoding in between."""

    number: int
    seconds: float
    whole: bool


@dataclass(slots=True)
class _Decoded:
    """A chunk whose records are decoded, or being decoded."""

    segment: Segment
    stats: ReadStats = field(default_factory=ReadStats)


class BackgroundDecoder:
    """Decodes and computes into the memory that the loader then reads, while something is on its way.

    Decoding is work that is saved, and never waited for: a chunk that is refined meanwhile is begun anew, and what is
    not decoded at the end the loader decodes layer by layer beside the computing, several chunks together. The chunk
    that came last is decoded first: the others may be refined sooner. A chunk is computed from its text where there is
    nothing to decode, and gives way between its layers to what has come.
    """

    def __init__(self, source: ChunkCache, layers: int, prefill: Prefill) -> None:
        self._source, self._layers, self._prefill = source, layers, prefill
        self._changed = threading.Condition()
        self._waiting: dict[int, Segment] = {}  # by number in the prompt; the last one came last
        self._text: tuple[int, Segment] | None = None  # what is to be computed, or is
        self._cut_off = False  # it is to be stopped
        self._told: Ended | None = None  # how the last one ended, until somebody asked
        self._computed: set[int] = set()
        self._decoding = 0.0  # seconds, of all so far
        self._ahead: dict[int, _Decoded] = {}
        self._stopped = False
        self._begun: set[str | None] = set()
        self._taken: dict[str | None, tuple[float, float]] = {}  # by level: seconds, tokens
        self._thread: threading.Thread | None = None

    def seconds(self, tokens: int, level: str) -> float:
        """Return the seconds that decoding takes during a fetch; an unmeasured level counts as the slowest.

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
            self._waiting.pop(number, None)
            self._waiting[number] = replace(segment, source=replace(segment.source, level=level))
            self._begin()

    @property
    def computing(self) -> int | None:
        """The chunk that is computed, or of which `ended` has not told yet how that ended."""
        with self._changed:
            return None if self._text is None else self._text[0]

    def compute(self, number: int, segment: Segment) -> None:
        """Compute a chunk alone, as the only one."""
        with self._changed:
            assert self._text is None
            self._text, self._cut_off = (number, segment), False
            self._begin()

    def stop(self) -> None:
        """Compute no more than the layer that is computed now; `ended` tells when that is over."""
        with self._changed:
            self._cut_off = True

    def ended(self) -> Ended | None:
        """Return the result of the computation, once; None before it ends, and afterwards."""
        with self._changed:
            told, self._told = self._told, None
            if told is not None:
                self._text = None
            return told

    def wait(self, seconds: float) -> None:
        """Wait for its end, so many seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._told is not None, seconds)

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtool-ahead", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def finish(self) -> None:
        """End after the layer that is being decoded or computed."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
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
            self._changed.wait_for(lambda: self._stopped or self._waiting or self._has_text())
            if self._stopped:
                return None
            if self._waiting:
                return functools.partial(self._decode, *self._waiting.popitem())
            assert self._text is not None
            return functools.partial(self._compute, *self._text)

    def _has_text(self) -> bool:
        return self._text is not None and self._told is None

    def _compute(self, number: int, segment: Segment) -> None:
        started, decoding, whole = time.perf_counter(), self._decoding, False
        try:
            kv = self._prefill(segment, self._gives_way)
            whole = kv is not None and self._hold(number, segment, kv)
        except Exception:
            whole = False  # whoever computes it in its place meets it again: an end of this thread would be waited for
        seconds = time.perf_counter() - started - (self._decoding - decoding)
        with self._changed:
            if whole:
                self._computed.add(number)
                self._waiting.pop(number, None)
            self._told = Ended(number, seconds, whole)
            self._changed.notify_all()

    def _gives_way(self) -> bool:
        """Decode what has come meanwhile; whether to go on computing."""
        while not self._stopped:
            with self._changed:
                if self._cut_off:
                    return False
                if not self._waiting:
                    return True
                number, segment = self._waiting.popitem()
            self._decode(number, segment)
        return False

    def _hold(self, number: int, segment: Segment, kv: ChunkKV) -> bool:
        """Hold what was computed instead of what came; False: a batch's memory is smaller than the chunk."""
        if number in self._ahead:
            self._source.forget(self._ahead[number].segment)
        held = replace(segment, source=replace(segment.source, level=COMPUTED))
        self._source.hold(held, kv.layers)
        return self._source.holds(held, self._layers)

    def _decode(self, number: int, segment: Segment) -> None:
        if number in self._ahead:
            self._source.forget(self._ahead[number].segment)
        begun = self._ahead[number] = _Decoded(segment)
        started, done = time.perf_counter(), 0
        try:
            while done < self._layers and not self._stopped and number not in self._waiting:
                self._source.read([segment], done, begun.stats)
                done += 1
        except Exception:
            return  # the loader meets it again, and makes what is damaged a hole
        finally:
            self._decoding += time.perf_counter() - started
        if done and segment.source.level in self._begun:
            self._learn(segment, time.perf_counter() - started, done / self._layers)
        self._begun.add(segment.source.level)

    def _learn(self, segment: Segment, seconds: float, share: float) -> None:
        with self._changed:
            before = self._taken.get(segment.source.level, (0.0, 0.0))
            self._taken[segment.source.level] = before[0] + seconds, before[1] + share * len(segment.ids)
