"""Records at new levels, read back before anything exact is given up."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from kvtool.core.cache.record import OVERHEAD_BYTES
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded
from kvtool.core.codec.encode import encode_levels
from kvtool.core.codec.levels import exact, known, level_of, nested
from kvtool.core.codec.nested import coarser
from kvtool.core.codec.payload import Coded
from kvtool.core.codec.profile import Profile
from kvtool.core.common.progress import Events
from kvtool.core.compress.compress_report import CompressReport, LevelReport
from kvtool.core.compress.options import CompressOptions
from kvtool.core.errors import DamagedError
from kvtool.core.model.prefill import ChunkKV
from kvtool.core.records.making import sealed
from kvtool.core.records.reading import exact_level, read_chunk, read_records
from kvtool.core.session.levels import ProfileShelf

_AT_ONCE = 16  # chunks that are encoded, made durable, read back
_SLACK = 1.01  # of a stated error: products of other sizes round otherwise


class Encoder:
    """Brings chunks to some levels."""

    def __init__(
        self,
        store: Store,
        writer: Writer,
        profile: Profile | None,
        options: CompressOptions,
        report: CompressReport,
        events: Events,
    ) -> None:
        self._store, self._writer, self._profile = store, writer, profile
        self._shelf = ProfileShelf(store)
        self._options, self._report, self._events = options, report, events

    def run(self, chunks: Sequence[bytes], levels: Sequence[str]) -> None:
        """Encode what is missing, read all of it back, drop what is exact if asked to."""
        order = known(levels)
        self._report.levels = [LevelReport(level) for level in order]
        self._events.step("compress", len(chunks), "chunks")
        for first in range(0, len(chunks), _AT_ONCE):
            some = [chunk for chunk in chunks[first : first + _AT_ONCE] if self._bring(chunk, order)]
            self._writer.flush()
            sound = [chunk for chunk in some if self._read_back(chunk, order)]
            if not self._options.keep_raw:
                self._drop_exact(sound, order)
            self._events.advance(len(chunks[first : first + _AT_ONCE]))
        if self._report.skipped:
            self._warn_of_skipped()

    def _warn_of_skipped(self) -> None:
        text = f"{self._report.skipped} chunks stay as they are: no exact record of them is left to encode"
        self._report.warnings.append(text)
        self._events.warn(text, "ingest their documents into a new store to encode them anew")

    # ---- encode ----

    def _bring(self, chunk: bytes, levels: Sequence[str]) -> bool:
        """Encode one chunk where that is needed; whether it has the levels now."""
        stored = self._store.levels(chunk)
        source = exact_level(self._store, chunk)
        stale = [level for level in nested(stored) if not self._is_current(chunk, level)]
        wanted = [level for level in levels if level not in stored or level in stale]
        if not wanted:
            self._report.kept += 1
            return True
        if source is None:
            self._report.skipped += 1
            return False
        if stale and nested(wanted):  # one may refine another: they go together
            for level in nested():
                self._writer.drop_level([chunk], level)
            wanted = [level for level in levels if not level_of(level).nested and level not in stored]
            wanted += nested([*levels, *stored])
        kept = [] if stale else nested(stored)
        self._encode(chunk, source, wanted, kept)
        return True

    def _is_current(self, chunk: bytes, level: str) -> bool:
        """Whether a stored lossy record, with all that it refines, is there and what this run would make."""
        try:
            item = read_records(self._store, [chunk], level, 0)[0]
            coded = Coded.parse(item.payload)
        except DamagedError:
            return False
        wanted = self._profile.digest if self._profile is not None else bytes(len(coded.profile))
        return coded.profile == wanted and (self._profile is not None or self._same_predictor(coded))

    def _same_predictor(self, coded: Coded) -> bool:
        name = self._options.predictor
        return name == "auto" or all(predictor.name.lower() == name for predictor in coded.predictors)

    def _encode(self, chunk: bytes, source: str, levels: Sequence[str], bases: Sequence[str]) -> None:
        info = self._store.chunk_info(chunk)
        if info is None:
            raise DamagedError(f"chunk {chunk.hex()[:12]} has lost its description", "ingest its document again")
        kv = read_chunk(self._store, chunk, source, info.layers)
        started = time.perf_counter()
        records: dict[str, list[bytes]] = {level: [] for level in levels}
        below = {coarser(level) for level in levels} - {*levels} if self._profile is not None else ()
        refined = [base for base in bases if base in below and self._made_of(chunk, kv, base)]
        for layer in range(info.layers):
            for level, record in self._layer(chunk, kv, layer, levels, refined):
                records[level].append(record)
        self._report.encode_seconds += time.perf_counter() - started
        self._report.encoded_bytes += 2 * kv.keys.numel() * kv.keys.element_size() * len(levels)
        self._report.encoded += 1
        for level in reversed(levels):  # the coarser first: what refines it is never stored without it
            self._writer.put_chunk(chunk, info, level, records[level])

    def _made_of(self, chunk: bytes, kv: ChunkKV, level: str) -> bool:
        """Whether a stored level was made of just this exact KV; one that was pulled may round otherwise, and what
        refines it would have to be refined by whoever made it."""
        for layer in range(len(kv.keys)):
            keys, values = kv.keys[layer], kv.values[layer]
            (stored,) = read_records(self._store, [chunk], level, layer)
            payload = b"".join(CODECS[level].encode(keys, values, layer, self._profile))
            made = Encoded(payload, stored.shape, stored.dtype)
            sides = [CODECS[level].decode([record], layer, self._shelf)[0] for record in (stored, made)]
            if not all(torch.equal(*pair) for pair in zip(*sides, strict=True)):
                return False
        return True

    def _layer(
        self, chunk: bytes, kv: ChunkKV, layer: int, levels: Sequence[str], bases: Sequence[str]
    ) -> Iterator[tuple[str, bytes]]:
        keys, values = kv.keys[layer], kv.values[layer]
        made = encode_levels(
            keys,
            values,
            layer,
            levels,
            self._profile,
            bases={base: read_records(self._store, [chunk], base, layer)[0].payload for base in bases},
            predictor=self._options.predictor,
            layers=len(kv.keys),
        )
        for level in levels:
            yield level, sealed(chunk, kv, level, layer, made[level])

    # ---- read back ----

    def _read_back(self, chunk: bytes, levels: Sequence[str]) -> bool:
        """Decode what is stored and count it; whether every layer is within the error that its record states."""
        info = self._store.chunk_info(chunk)
        source = exact_level(self._store, chunk)
        if info is None:
            return False
        exact = read_chunk(self._store, chunk, source, info.layers) if source else None
        sound = True
        for report in self._report.levels:
            if report.level in levels:
                sound &= self._count(chunk, report, info.layers, exact)
        return sound

    def _count(self, chunk: bytes, report: LevelReport, layers: int, exact: ChunkKV | None) -> bool:
        sound = True
        report.chunks += 1
        for layer in range(layers):
            item = read_records(self._store, [chunk], report.level, layer)[0]
            started = time.perf_counter()
            keys, values = CODECS[report.level].decode([item], layer, self._shelf)[0]
            self._report.decode_seconds += time.perf_counter() - started
            elements = keys.numel() + values.numel()
            self._report.decoded_bytes += elements * keys.element_size()
            report.elements += elements
            report.bytes += sum(len(record.payload) + OVERHEAD_BYTES for record in item.chain())
            stated = CODECS[report.level].stated_error(item.payload)
            report.error += elements * sum(stated) / 2
            if exact is not None:
                sound &= _within(keys, exact.keys[layer], stated[0]) and _within(values, exact.values[layer], stated[1])
        if not sound:
            raise DamagedError(
                f"chunk {chunk.hex()[:12]} did not come back from level {report.level} as it was encoded",
                "nothing was dropped; please report this",
            )
        return sound

    def _drop_exact(self, chunks: Sequence[bytes], levels: Sequence[str]) -> None:
        for level in exact():
            if level not in levels:
                self._report.dropped += self._writer.drop_level(chunks, level)


def _within(made: torch.Tensor, exact: torch.Tensor, stated: float) -> bool:
    """Whether the relative error is what the record states; 0: bit for bit."""
    if stated == 0.0:
        return torch.equal(made, exact)
    size = exact.float().square().mean().sqrt().clamp_min(1e-30)
    wrong = (made.float() - exact.float()).square().mean().sqrt()
    return bool(torch.isfinite(wrong)) and float(wrong / size) <= stated * _SLACK
