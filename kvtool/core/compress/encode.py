"""Records at new levels, read back before anything exact is given up."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.base import Encoded
from kvtool.core.codec.levels import coarser, exact, known, level_of, nested, profiled
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.record import Record
from kvtool.core.codec.row_subset import inner_of
from kvtool.core.common.sizes import counted
from kvtool.core.common.types import Events
from kvtool.core.compress.compress_report import CompressReport, LevelReport
from kvtool.core.compress.encoding import Task
from kvtool.core.compress.hands import Hands, OwnHands, Plan
from kvtool.core.compress.options import CompressOptions
from kvtool.core.compress.ray_hands import RaysHands
from kvtool.core.compress.read_back import ReadBack
from kvtool.core.compress.rows import HeavyRows
from kvtool.core.errors import DamagedError
from kvtool.core.records.encode import encoder_threads
from kvtool.core.records.read import exact_level, read_records
from kvtool.core.session.identity import ProfileCache

_AT_ONCE = 16  # chunks that are encoded, made durable, read back


class Encoder:
    """Brings chunks to some levels, several at a time: as many as torch has threads, or as Ray has workers.

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
        self._shelf = ProfileCache(store)
        self._options, self._report, self._events = options, report, events
        self._there: list[bytes] = []  # chunks that have the levels now, and were not read back
        self._bare = 0  # chunks passed over that have no record at all: here an ingest computes them again

    def run(self, chunks: Sequence[bytes], levels: Sequence[str]) -> None:
        """Encode what is missing, read all of it back, drop what is exact if asked to."""
        order = known(levels)
        self._report.levels = [LevelReport(level) for level in order]
        self._events.step("compress", len(chunks), "chunks")
        with encoder_threads() as pool, closing(self._hands(pool)) as hands:
            back = ReadBack(self._store, self._shelf, self._report, pool)
            for first in range(0, len(chunks), _AT_ONCE):
                for plan in self._plans(chunks[first : first + _AT_ONCE], order):
                    hands.give(plan)
                    while hands.is_full:
                        self._take(hands, back)
                self._settle(back)
            while hands.is_busy:
                self._take(hands, back)
            self._settle(back, last=True)
            self._report.workers = hands.workers
        if lossy := self._report.skipped - self._bare:
            stay = counted(lossy, "chunk stays as it is", "chunks stay as they are")
            text = f"{stay}: no exact record is left to encode"
            self._warn(text, "ingest their documents into a new store to encode them anew")
        if self._bare:
            text = f"{counted(self._bare, 'chunk')} passed over: no KV is stored, as after `store prune`"
            self._warn(text, "`kvtool ingest` of their documents computes it again; then compress once more")

    def _hands(self, pool: ThreadPoolExecutor) -> Hands:
        if self._options.ray:
            return RaysHands(self._task, self._profile, self._options, self._warn)
        return OwnHands(self._task, self._profile, pool, _AT_ONCE)

    def _warn(self, text: str, hint: str) -> None:
        self._report.warnings.append(text)
        self._events.warn(text, hint)

    def _take(self, hands: Hands, back: ReadBack) -> None:
        """Write what was encoded."""
        for plan, made in hands.take():
            self._report.encode_seconds += made.seconds
            self._report.encoded_bytes += made.raw_bytes * len(plan.levels)
            self._report.encoded += 1
            for level in reversed(plan.levels):  # the coarser first: what refines it is never stored without it
                self._writer.put_chunk(plan.chunk, plan.info, level, made.records[level])
            self._there.append(plan.chunk)
        self._settle(back)

    def _settle(self, back: ReadBack, last: bool = False) -> None:
        """Make what is there durable and read it back, many chunks at a time."""
        if len(self._there) < (1 if last else _AT_ONCE):
            return
        some, self._there = self._there, []
        levels = [level.level for level in self._report.levels]
        self._writer.flush()
        sound = back.sound(some, levels)
        if self._options.drops_exact:
            self._drop_exact(sound, levels)
        self._events.advance(len(some))

    def _drop_exact(self, chunks: Sequence[bytes], levels: Sequence[str]) -> None:
        for level in exact():
            if level not in levels:
                self._report.dropped += self._writer.drop_level(chunks, level)

    # ---- what to make ----

    def _plans(self, chunks: Sequence[bytes], levels: Sequence[str]) -> list[Plan]:
        """Plan the encoding of some chunks; chunks without work are left out."""
        found = [self._plan(chunk, levels) for chunk in chunks]
        plans = [plan for plan in found if plan is not None]
        if self._heavy is not None:
            self._heavy.learn([(plan.chunk, plan.info.token_ids) for plan in plans if plan.sparse])
        return plans

    def _plan(self, chunk: bytes, levels: Sequence[str]) -> Plan | None:
        """Plan the encoding of a chunk; None if there is nothing to do, or nothing can be done."""
        stored = self._store.levels(chunk)
        source = exact_level(self._store, chunk)
        stale = [level for level in profiled(stored) if not self._is_current(chunk, level)]
        wanted = [level for level in levels if level not in stored or level in stale]
        if not wanted:
            self._report.kept += 1
            self._there.append(chunk)
            return None
        if source is None:
            self._report.skipped += 1
            self._bare += not stored
            self._events.advance(1)
            return None
        doomed = [level for level in stale if level in wanted]
        if nested(stale) and nested(wanted):  # one may refine another: they go together
            doomed = [*nested(), *(level for level in doomed if not level_of(level).nested)]
            wanted = [level for level in wanted if not level_of(level).nested] + nested([*levels, *stored])
        for level in doomed:
            self._writer.drop_level([chunk], level)
        info = self._store.chunk_info(chunk)
        if info is None:
            raise DamagedError(f"chunk {chunk.hex()[:12]} has lost its description", "ingest its document again")
        return Plan(chunk, info, source, tuple(wanted), () if nested(stale) else tuple(nested(stored)))

    def _is_current(self, chunk: bytes, level: str) -> bool:
        """Return True if a stored lossy record and all that it refines are readable and of the current profile."""
        try:
            item = read_records(self._store, [chunk], level, 0)[0]
            coded = Record.parse(item.payload if level_of(level).share == 100 else inner_of(item).payload)
        except DamagedError:
            return False
        return self._profile is not None and coded.profile == self._profile.digest

    def _task(self, plan: Plan) -> Task:
        """Read what a chunk's records are made of; by any thread."""
        below = {coarser(level) for level in nested(plan.levels)} - {*plan.levels} if self._profile is not None else ()
        rows = {}
        for level in plan.sparse:
            assert self._heavy is not None
            rows[level] = self._heavy.of(plan.chunk, plan.info.token_ids, level)
        return Task(
            plan.chunk,
            plan.source,
            self._records(plan, plan.source),
            plan.levels,
            {base: self._records(plan, base) for base in plan.kept if base in below},
            rows,
        )

    def _records(self, plan: Plan, level: str) -> list[Encoded]:
        return [read_records(self._store, [plan.chunk], level, layer)[0] for layer in range(plan.info.layers)]
