"""Verification of stored records: they are decoded again, and compared with their input."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from kvtool.core.cache.record import OVERHEAD_BYTES
from kvtool.core.cache.store import Store
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import LayerKV, Profiles
from kvtool.core.codec.encode import some_rows
from kvtool.core.codec.transform_kernels import errors_of
from kvtool.core.common.types import Ids
from kvtool.core.compress.compress_report import CompressReport, LevelReport
from kvtool.core.errors import DamagedError
from kvtool.core.records.read import exact_level, read_records, stored_rows

_SLACK = 1.01  # of a stated error: products of other sizes round otherwise


@dataclass(slots=True)
class _Count:
    """Counts what one layer of some chunks takes at a level."""

    bytes: int = 0
    elements: int = 0
    error: float = 0.0
    decoded_bytes: int = 0
    seconds: float = 0.0


class ReadBack:
    """Reads what was written, layer by layer, several layers at a time."""

    def __init__(self, store: Store, profiles: Profiles, report: CompressReport, pool: ThreadPoolExecutor) -> None:
        self._store, self._profiles, self._report, self._pool = store, profiles, report, pool

    def sound(self, chunks: Sequence[bytes], levels: Sequence[str]) -> list[bytes]:
        """Decode chunks at some levels and count them; returns those that have a description.

        Raises
        ------
        DamagedError : a record cannot be read, or is not within the error that it states.
        """
        infos = {chunk: self._store.chunk_info(chunk) for chunk in chunks}
        there = [chunk for chunk, info in infos.items() if info is not None]
        layers = max((info.layers for info in infos.values() if info is not None), default=0)
        sources = {chunk: exact_level(self._store, chunk) for chunk in there}
        for report in (report for report in self._report.levels if report.level in levels):
            report.chunks += len(there)
            for count in self._pool.map(partial(self._layer, report, sources), range(layers)):
                self._add(report, count)
        return there

    def _add(self, report: LevelReport, count: _Count) -> None:
        report.bytes += count.bytes
        report.elements += count.elements
        report.error += count.error
        self._report.decoded_bytes += count.decoded_bytes
        self._report.decode_seconds += count.seconds

    def _layer(self, report: LevelReport, sources: dict[bytes, str | None], layer: int) -> _Count:
        chunks = [*sources]
        items = read_records(self._store, chunks, report.level, layer)
        started = time.thread_time()
        made = CODECS[report.level].decode(items, layer, self._profiles)
        count = _Count(seconds=time.thread_time() - started)
        stated = [CODECS[report.level].stated_error(item.payload) for item in items]
        for item, kv, errors in zip(items, made, stated, strict=True):
            elements = 2 * math.prod(item.shape)
            count.bytes += sum(len(record.payload) + OVERHEAD_BYTES for record in item.chain())
            count.elements += elements
            count.decoded_bytes += sum(side.nbytes for side in kv)
            count.error += elements * sum(errors) / 2
        rows = [stored_rows(item, report.level) for item in items]
        self._compare(report.level, layer, sources, made, stated, rows)
        return count

    def _compare(
        self,
        level: str,
        layer: int,
        sources: dict[bytes, str | None],
        made: Sequence[LayerKV],
        stated: Sequence[tuple[float, float]],
        rows: Sequence[Ids | None],
    ) -> None:
        """Refuse what is not within the error that its record states; 0: bit for bit. `rows`: those that are stored."""
        chunks = [*sources]
        for source in {source for source in sources.values() if source is not None}:
            numbers = [number for number, chunk in enumerate(chunks) if sources[chunk] == source]
            items = read_records(self._store, [chunks[number] for number in numbers], source, layer)
            right = CODECS[source].decode(items, layer)
            right = [_stored(kv, rows[number]) for number, kv in zip(numbers, right, strict=True)]
            sound = _within([made[at] for at in numbers], right, [stated[at] for at in numbers])
            for number, within in zip(numbers, sound, strict=True):
                if not within:
                    raise DamagedError(
                        f"chunk {chunks[number].hex()[:12]} did not come back from level {level} as it was encoded",
                        "nothing was dropped; please report this",
                    )


def _stored(kv: LayerKV, rows: Ids | None) -> LayerKV:
    return kv if rows is None else some_rows([kv], rows)[0]


def _alike(made: LayerKV, exact: LayerKV) -> bool:
    return all((one.shape, one.dtype) == (other.shape, other.dtype) for one, other in zip(made, exact, strict=True))


def _within(made: Sequence[LayerKV], exact: Sequence[LayerKV], stated: Sequence[tuple[float, float]]) -> list[bool]:
    """Return True for each chunk that is equal to its input, or as near as its records state."""
    left, right = ([side for kv in kvs for side in kv] for kvs in (made, exact))
    if [(side.shape, side.dtype) for side in left] != [(side.shape, side.dtype) for side in right]:
        return [_alike(*pair) for pair in zip(made, exact, strict=True)]
    bounds = [bound for pair in stated for bound in pair]
    sound = [
        torch.equal(one, other) if bound == 0.0 else error <= bound * _SLACK
        for one, other, bound, error in zip(left, right, bounds, errors_of(left, right), strict=True)
    ]
    return [all(pair) for pair in zip(sound[::2], sound[1::2], strict=True)]
