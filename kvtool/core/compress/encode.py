"""Records at new levels, read back before anything exact is given up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from kvtool.core.cache.entries import ChunkInfo
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded, LayerKV
from kvtool.core.codec.encode import encode_levels, encode_rows
from kvtool.core.codec.kept import inner_of
from kvtool.core.codec.levels import exact, known, level_of, nested, profiled, whole
from kvtool.core.codec.nested import coarser
from kvtool.core.codec.payload import Coded
from kvtool.core.codec.profile import Profile
from kvtool.core.common.progress import Events
from kvtool.core.compress.compress_report import CompressReport, LevelReport
from kvtool.core.compress.options import CompressOptions
from kvtool.core.compress.read_back import ReadBack
from kvtool.core.compress.rows import HeavyRows
from kvtool.core.errors import DamagedError
from kvtool.core.records.making import sealed
from kvtool.core.records.reading import exact_level, read_layers, read_records
from kvtool.core.records.threads import working
from kvtool.core.session.levels import ProfileShelf

_AT_ONCE = 16  # chunks that are encoded, made durable, read back


@dataclass(frozen=True, slots=True)
class _Plan:
    """Tells what is to be made of a chunk.

    Attributes
    ----------
    source : the exact level that it is made of.
    kept : nested levels that stay as they are, which new ones may refine.
    """

    chunk: bytes
    info: ChunkInfo
    source: str
    levels: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def sparse(self) -> list[str]:
        """Those of its levels that leave rows out."""
        return [level for level in self.levels if level_of(level).share < 100]


@dataclass(frozen=True, slots=True)
class _Made:
    """Holds a chunk's records by level, and what making them took."""

    records: dict[str, list[bytes]]
    raw_bytes: int
    seconds: float


class Encoder:
    """Brings chunks to some levels, several at a time: as many as torch has threads.

    Parameters
    ----------
    heavy : chooses rows; None: no level that leaves some out is asked for.
    """

    def __init__(
        self,
        store: Store,
        writer: Writer,
        profile: Profile | None,
        options: CompressOptions,
        report: CompressReport,
        events: Events,
        heavy: HeavyRows | None = None,
    ) -> None:
        self._store, self._writer, self._profile, self._heavy = store, writer, profile, heavy
        self._shelf = ProfileShelf(store)
        self._options, self._report, self._events = options, report, events

    def run(self, chunks: Sequence[bytes], levels: Sequence[str]) -> None:
        """Encode what is missing, read all of it back, drop what is exact if asked to."""
        order = known(levels)
        self._report.levels = [LevelReport(level) for level in order]
        self._events.step("compress", len(chunks), "chunks")
        with working() as pool:
            back = ReadBack(self._store, self._shelf, self._report, pool)
            for first in range(0, len(chunks), _AT_ONCE):
                some = self._bring(chunks[first : first + _AT_ONCE], order, pool)
                self._writer.flush()
                sound = back.sound(some, order)
                if not self._options.keep_raw:
                    self._drop_exact(sound, order)
                self._events.advance(len(chunks[first : first + _AT_ONCE]))
        if self._report.skipped:
            self._warn_of_skipped()

    def _warn_of_skipped(self) -> None:
        text = f"{self._report.skipped} chunks stay as they are: no exact record of them is left to encode"
        self._report.warnings.append(text)
        self._events.warn(text, "ingest their documents into a new store to encode them anew")

    def _drop_exact(self, chunks: Sequence[bytes], levels: Sequence[str]) -> None:
        for level in exact():
            if level not in levels:
                self._report.dropped += self._writer.drop_level(chunks, level)

    # ---- what to make ----

    def _bring(self, chunks: Sequence[bytes], levels: Sequence[str], pool: ThreadPoolExecutor) -> list[bytes]:
        """Encode chunks where that is needed; returns those that have the levels now."""
        plans: list[_Plan] = []
        brought = [chunk for chunk in chunks if self._plan(chunk, levels, plans)]
        if self._heavy is not None:
            self._heavy.learn([(plan.chunk, plan.info.token_ids) for plan in plans if plan.sparse])
        for plan, made in zip(plans, pool.map(self._made, plans), strict=True):
            self._report.encode_seconds += made.seconds
            self._report.encoded_bytes += made.raw_bytes * len(plan.levels)
            self._report.encoded += 1
            for level in reversed(plan.levels):  # the coarser first: what refines it is never stored without it
                self._writer.put_chunk(plan.chunk, plan.info, level, made.records[level])
        return brought

    def _plan(self, chunk: bytes, levels: Sequence[str], plans: list[_Plan]) -> bool:
        """Add what a chunk needs, if anything; whether it will have the levels."""
        stored = self._store.levels(chunk)
        source = exact_level(self._store, chunk)
        stale = [level for level in profiled(stored) if not self._is_current(chunk, level)]
        wanted = [level for level in levels if level not in stored or level in stale]
        if not wanted:
            self._report.kept += 1
            return True
        if source is None:
            self._report.skipped += 1
            return False
        doomed = [level for level in stale if level in wanted]
        if nested(stale) and nested(wanted):  # one may refine another: they go together
            doomed = [*nested(), *(level for level in doomed if not level_of(level).nested)]
            wanted = [level for level in wanted if not level_of(level).nested] + nested([*levels, *stored])
        for level in doomed:
            self._writer.drop_level([chunk], level)
        info = self._store.chunk_info(chunk)
        if info is None:
            raise DamagedError(f"chunk {chunk.hex()[:12]} has lost its description", "ingest its document again")
        plans.append(_Plan(chunk, info, source, tuple(wanted), () if nested(stale) else tuple(nested(stored))))
        return True

    def _is_current(self, chunk: bytes, level: str) -> bool:
        """Whether a stored lossy record, with all that it refines, is there and what this run would make."""
        try:
            item = read_records(self._store, [chunk], level, 0)[0]
            coded = Coded.parse(item.payload if level_of(level).share == 100 else inner_of(item).payload)
        except DamagedError:
            return False
        wanted = self._profile.digest if self._profile is not None else bytes(len(coded.profile))
        return coded.profile == wanted and (self._profile is not None or self._same_predictor(coded))

    def _same_predictor(self, coded: Coded) -> bool:
        name = self._options.predictor
        return name == "auto" or all(predictor.name.lower() == name for predictor in coded.predictors)

    # ---- encode: by any thread ----

    def _made(self, plan: _Plan) -> _Made:
        layers = range(plan.info.layers)
        kvs = read_layers(self._store, plan.chunk, plan.source, plan.info.layers)
        started = time.thread_time()
        below = {coarser(level) for level in nested(plan.levels)} - {*plan.levels} if self._profile is not None else ()
        refined = [base for base in plan.kept if base in below and self._made_of(plan.chunk, kvs, base)]
        bases = {
            base: [read_records(self._store, [plan.chunk], base, layer)[0].payload for layer in layers]
            for base in refined
        }
        how = self._options.predictor
        made = encode_levels(
            layers, kvs, whole(plan.levels), self._profile, bases=bases, predictor=how, layers=len(layers)
        )
        for level in plan.sparse:
            assert self._heavy is not None
            rows = self._heavy.of(plan.chunk, plan.info.token_ids, level)
            made[level] = encode_rows(layers, kvs, rows, level, self._profile, predictor=how, layers=len(layers))
        records = {
            level: [sealed(plan.chunk, kvs[layer], level, layer, made[level][layer]) for layer in layers]
            for level in plan.levels
        }
        size = sum(side.nbytes for kv in kvs for side in kv)
        return _Made(records, size, time.thread_time() - started)

    def _made_of(self, chunk: bytes, kvs: Sequence[LayerKV], level: str) -> bool:
        """Whether a stored level was made of just this exact KV; one that was pulled may round otherwise, and what
        refines it would have to be refined by whoever made it."""
        for layer, payload in enumerate(CODECS[level].encode_layers(kvs, self._profile)):
            (stored,) = read_records(self._store, [chunk], level, layer)
            made = Encoded(b"".join(payload), stored.shape, stored.dtype)
            sides = [CODECS[level].decode([record], layer, self._shelf)[0] for record in (stored, made)]
            if not all(torch.equal(*pair) for pair in zip(*sides, strict=True)):
                return False
        return True
