"""The order of a compression, and the records at new levels, read back before anything exact is given up."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from kvtool.core.cache.entries import ChunkInfo
from kvtool.core.cache.identity import chunk_named
from kvtool.core.cache.record import OVERHEAD_BYTES
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec import CODECS
from kvtool.core.codec.base import Encoded, LayerKV, no_profiles
from kvtool.core.codec.levels import (
    DEFAULT_LOSSY,
    NO_PROFILE,
    coarser,
    enough_loss,
    exact,
    keeping,
    known,
    level_of,
    lossy,
    nested,
    profiled,
    whole,
)
from kvtool.core.codec.profile import Profile
from kvtool.core.codec.record import Record
from kvtool.core.codec.row_subset import inner_of
from kvtool.core.codec.transform import encode_levels, encode_rows, some_rows
from kvtool.core.codec.transform_kernels import errors_of
from kvtool.core.common.text import counted
from kvtool.core.common.types import Events, Ids
from kvtool.core.compress.fitting import fit, keep_profile, profile_of
from kvtool.core.compress.loss import HeavyRows, LevelScheme, mean_loss, measure, own_prompts
from kvtool.core.compress.options import AUTO, CompressOptions, CompressReport, LevelReport
from kvtool.core.errors import DamagedError, KvtoolError, NoDocumentsError, NoSpaceError, UsageError
from kvtool.core.model.decoder import Decoder
from kvtool.core.records.encode import encoder_threads, sealed
from kvtool.core.records.read import exact_level, read_records, stored_rows
from kvtool.core.session.identity import ProfileCache, smallest_allowed
from kvtool.core.session.session import Session
from kvtool.core.upkeep.plan import level_bytes

_AT_ONCE = 16  # chunks that are encoded, made durable, read back
_SLACK = 1.01  # of a stated error: products of other sizes round otherwise


@dataclass(frozen=True, slots=True)
class Plan:
    chunk: bytes
    info: ChunkInfo
    source: str
    levels: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def sparse(self) -> list[str]:
        return [level for level in self.levels if level_of(level).share < 100]


@dataclass(frozen=True, slots=True)
class Made:
    records: dict[str, list[bytes]]
    raw_bytes: int
    seconds: float


class LevelWriter:
    def __init__(
        self,
        store: Store,
        writer: Writer,
        profile: Profile | None,
        options: CompressOptions,
        report: CompressReport,
        events: Events,
        heavy: HeavyRows,
    ) -> None:
        self._store, self._writer, self._profile, self._heavy = store, writer, profile, heavy
        self._profiles = ProfileCache(store)
        self._options, self._report, self._events = options, report, events
        self._unread: list[bytes] = []  # chunks that have the levels now, and were not read back
        self._bare = 0  # chunks passed over that have no record at all: here an ingest computes them again

    def run(self, chunks: Sequence[bytes], levels: Sequence[str]) -> None:
        order = known(levels)
        self._report.levels = [LevelReport(level) for level in order]
        self._events.step("compress", len(chunks), "chunks")
        with encoder_threads() as pool:
            for first in range(0, len(chunks), _AT_ONCE):
                plans = self._plans(chunks[first : first + _AT_ONCE], order)
                for plan, made in zip(plans, pool.map(self._made, plans), strict=True):
                    self._put(plan, made)
                self._settle(pool)
            self._settle(pool, last=True)
        if lossy := self._report.skipped - self._bare:
            stay = counted(lossy, "chunk stays as it is", "chunks stay as they are")
            text = f"{stay}: no exact record is left to encode"
            self._warn(text, "ingest their documents into a new store to encode them anew")
        if self._bare:
            text = f"{counted(self._bare, 'chunk')} passed over: no KV is stored, as after `store prune`"
            self._warn(text, "`kvtool ingest` of their documents computes it again; then compress once more")

    def _warn(self, text: str, hint: str) -> None:
        self._report.warnings.append(text)
        self._events.warn(text, hint)

    def _put(self, plan: Plan, made: Made) -> None:
        self._report.encode_seconds += made.seconds
        self._report.encoded_bytes += made.raw_bytes * len(plan.levels)
        self._report.encoded += 1
        for level in reversed(plan.levels):  # the coarser first: what refines it is never stored without it
            self._writer.put_chunk(plan.chunk, plan.info, level, made.records[level])
        self._unread.append(plan.chunk)

    def _settle(self, pool: ThreadPoolExecutor, last: bool = False) -> None:
        if len(self._unread) < (1 if last else _AT_ONCE):
            return
        some, self._unread = self._unread, []
        self._writer.flush()
        sound = self._read_back(pool, some)
        if self._options.drops_exact:
            for level in sorted({*exact()} - {report.level for report in self._report.levels}):
                self._report.dropped += self._writer.drop_level(sound, level)
        self._events.advance(len(some))

    # ---- what to make ----

    def _plans(self, chunks: Sequence[bytes], levels: Sequence[str]) -> list[Plan]:
        found = [self._plan(chunk, levels) for chunk in chunks]
        plans = [plan for plan in found if plan is not None]
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
            self._unread.append(chunk)
            return None
        if source is None:
            self._report.skipped += 1
            self._bare += not stored
            self._events.advance(1)
            return None
        outdated = [level for level in stale if level in wanted]
        if nested(stale) and nested(wanted):  # one may refine another: they go together
            outdated = [*nested(), *(level for level in outdated if not level_of(level).nested)]
            wanted = [level for level in wanted if not level_of(level).nested] + nested([*levels, *stored])
        for level in outdated:
            self._writer.drop_level([chunk], level)
        info = self._store.chunk_info(chunk)
        if info is None:
            raise DamagedError(f"chunk {chunk.hex()[:12]} has lost its description", "ingest its document again")
        return Plan(chunk, info, source, tuple(wanted), () if nested(stale) else tuple(nested(stored)))

    def _is_current(self, chunk: bytes, level: str) -> bool:
        try:
            item = read_records(self._store, [chunk], level, 0)[0]
            coded = Record.parse(item.payload if level_of(level).share == 100 else inner_of(item).payload)
        except DamagedError:
            return False
        return self._profile is not None and coded.profile == self._profile.digest

    def _made(self, plan: Plan) -> Made:
        """Encode a chunk's exact records at each of its levels; called by any thread. Raises DamagedError."""
        profile, exact = self._profile, self._records(plan, plan.source)
        below = {coarser(level) for level in nested(plan.levels)} - {*plan.levels} if profile is not None else ()
        stored = {base: self._records(plan, base) for base in plan.kept if base in below}
        rows = {level: self._heavy.of(plan.chunk, plan.info.token_ids, level) for level in plan.sparse}
        started = time.thread_time()
        kvs = CODECS[plan.source].decode_layers(exact)
        own = {level: items for level, items in stored.items() if _is_of(kvs, level, items, profile)}
        bases = {level: [item.payload for item in items] for level, items in own.items()}
        made = encode_levels(kvs, whole(plan.levels), profile, bases)
        made |= {level: encode_rows(kvs, kept, level, profile) for level, kept in rows.items()}
        records = {
            level: [sealed(plan.chunk, kv, level, layer, made[level][layer]) for layer, kv in enumerate(kvs)]
            for level in plan.levels
        }
        size = sum(side.nbytes for kv in kvs for side in kv)
        return Made(records, size, time.thread_time() - started)

    def _records(self, plan: Plan, level: str) -> list[Encoded]:
        return [read_records(self._store, [plan.chunk], level, layer)[0] for layer in range(plan.info.layers)]

    # ---- what was made ----

    def _read_back(self, pool: ThreadPoolExecutor, chunks: Sequence[bytes]) -> list[bytes]:
        """Decode chunks at all levels and count them; returns those that have a description. Raises DamagedError."""
        infos = {chunk: self._store.chunk_info(chunk) for chunk in chunks}
        there = [chunk for chunk, info in infos.items() if info is not None]
        layers = max((info.layers for info in infos.values() if info is not None), default=0)
        sources = {chunk: exact_level(self._store, chunk) for chunk in there}
        for report in self._report.levels:
            report.chunks += len(there)
            check = partial(self._layer, report.level, sources)
            for count, decoded_bytes, seconds in pool.map(check, range(layers)):
                report.bytes += count.bytes
                report.elements += count.elements
                report.error += count.error
                self._report.decoded_bytes += decoded_bytes
                self._report.decode_seconds += seconds
        return there

    def _layer(self, level: str, sources: dict[bytes, str | None], layer: int) -> tuple[LevelReport, int, float]:
        """Compare one layer; return its counts, and the bytes and seconds of its decoding."""
        items = read_records(self._store, [*sources], level, layer)
        started = time.thread_time()
        made = CODECS[level].decode(items, layer, self._profiles)
        seconds = time.thread_time() - started
        count = LevelReport(level)
        stated = [CODECS[level].stated_error(item.payload) for item in items]
        for item, errors in zip(items, stated, strict=True):
            elements = 2 * math.prod(item.shape)
            count.bytes += sum(len(record.payload) + OVERHEAD_BYTES for record in item.chain())
            count.elements += elements
            count.error += elements * sum(errors) / 2
        self._compare(level, layer, sources, made, stated, [stored_rows(item, level) for item in items])
        return count, sum(side.nbytes for kv in made for side in kv), seconds

    def _compare(
        self,
        level: str,
        layer: int,
        sources: dict[bytes, str | None],
        made: Sequence[LayerKV],
        stated: Sequence[tuple[float, float]],
        rows: Sequence[Ids | None],
    ) -> None:
        """Refuse a chunk outside the error that its record states; 0: bit for bit. `rows`: those that are stored."""
        chunks = [*sources]
        for source in {source for source in sources.values() if source is not None}:
            numbers = [number for number, chunk in enumerate(chunks) if sources[chunk] == source]
            items = read_records(self._store, [chunks[number] for number in numbers], source, layer)
            for number, kv in zip(numbers, CODECS[source].decode(items, layer), strict=True):
                stored = rows[number]
                right = kv if stored is None else some_rows([kv], stored)[0]
                if not _is_sound(made[number], right, stated[number]):
                    raise DamagedError(
                        f"chunk {chunks[number].hex()[:12]} did not come back from level {level} as it was encoded",
                        "nothing was dropped; please report this",
                    )


def _is_of(kvs: Sequence[LayerKV], level: str, stored: Sequence[Encoded], profile: Profile | None) -> bool:
    """A pulled level may round differently: then only its maker could refine it."""

    def profiles(digest: bytes) -> Profile:
        return profile if profile is not None and digest == profile.digest else no_profiles(digest)

    for layer, (item, payload) in enumerate(zip(stored, CODECS[level].encode_layers(kvs, profile), strict=True)):
        made = Encoded(b"".join(payload), item.shape, item.dtype)
        sides = [CODECS[level].decode([record], layer, profiles)[0] for record in (item, made)]
        if not all(torch.equal(*pair) for pair in zip(*sides, strict=True)):
            return False
    return True


def _is_sound(made: LayerKV, exact: LayerKV, stated: tuple[float, float]) -> bool:
    """Return True if a chunk is equal to its input, or as near as its record states."""
    if [(side.shape, side.dtype) for side in made] != [(side.shape, side.dtype) for side in exact]:
        return False
    sides = zip(made, exact, stated, errors_of(made, exact), strict=True)
    return all(
        torch.equal(one, other) if bound == 0.0 else error <= bound * _SLACK for one, other, bound, error in sides
    )


FIT_CHUNKS = 64
_SEED = 0


def compress(
    path: Path, options: CompressOptions, events: Events | None = None, decoder: Decoder | None = None
) -> CompressReport:
    levels = check_levels(options)
    started = time.perf_counter()
    with Store.open(path) as store, store.writer(options.lock_wait, options.max_size) as writer:
        needs_profile = options.profile is None and (AUTO in levels or bool(profiled(levels)))
        fits = options.fit or (needs_profile and not store.codec_state().get("profile"))
        session = Session.open(store, options, gradients=fits, decoder=None if fits else decoder)
        report = _Job(session, writer, replace(options, fit=fits), events or Events()).run(levels)
    report.seconds = time.perf_counter() - started
    return report


def check_levels(options: CompressOptions) -> list[str]:
    """List the levels that are asked for, each once; `auto` stays as it is. Raises UsageError."""
    named = list(dict.fromkeys(options.levels)) or [AUTO if options.max_loss is not None else DEFAULT_LOSSY]
    levels = [level if level == AUTO else keeping(level, options.share) for level in named]
    for level in levels:
        if level_of(level).verbatim:
            raise UsageError(f"{level} is what there is before compression", f"leave --level {level} out")
    if AUTO in levels and options.questions == 0:
        raise UsageError("--level auto needs a measured loss", "leave --questions 0 out, or name a level")
    return levels


class _Job:
    def __init__(self, session: Session, writer: Writer, options: CompressOptions, events: Events) -> None:
        self.session, self.store, self.identity = session, session.store, session.identity
        self.identity.check_movable("compress")
        self.writer, self.options, self.events = writer, options, events
        self.report = CompressReport()
        self.heavy = HeavyRows(session)

    def run(self, levels: list[str]) -> CompressReport:
        report = self.report
        if self.options.drops_exact:
            self.writer.spend_reserve()
        report.bytes_before, report.file_before = self.store.stats()["bytes"], self.store.environment.file_bytes()
        chunks = self._chunks()
        profile = self._profile(chunks)
        losses = self._losses(levels, profile, chunks)
        levels = self._chosen(levels, losses)
        self._judge(levels, losses)
        refuses = self.options.drops_exact and not self.options.yes and not report.is_allowed
        if refuses and self._exact_bytes(chunks, levels):
            raise self._refusal(levels)
        if any(level_of(level).share < 100 for level in levels):
            self._load()
        LevelWriter(self.store, self.writer, profile, self.options, report, self.events, self.heavy).run(chunks, levels)
        for row in report.levels:
            row.loss = losses.get(row.level, {})
        report.bytes_after = self.store.stats()["bytes"]
        if report.dropped:
            self._compact()
        report.file_after = self.store.environment.file_bytes()
        if exact_bytes := self._exact_bytes(chunks, levels):
            report.file_without_exact = self.store.stats()["live_bytes"] - exact_bytes
        return report

    # ---- the limit ----

    def _judge(self, levels: Sequence[str], losses: Mapping[str, Mapping[str, float]]) -> None:
        known = {level: row["kl_answer"] for level, row in losses.items()}
        self.report.max_loss = self.options.allowed_loss
        read = smallest_allowed(levels, known, self.report.max_loss)
        self.report.loss = 0.0 if read in exact() else known.get(str(read))

    def _refusal(self, levels: Sequence[str]) -> UsageError:
        loss, made, anyway = self.report.loss, " and ".join(levels), "--yes drops them all the same"
        if loss is None:
            measured = "" if self.options.questions else "without --questions 0 it is measured; "
            return UsageError(f"the loss of level {made} is not measured: exact records stay", measured + anyway)
        return UsageError(
            f"level {made} loses {loss:.4f} nats a token of at most {self.report.max_loss:g}: exact records stay",
            f"--level auto takes one that loses less; --max-loss {enough_loss(loss)} allows this; {anyway}",
        )

    def _exact_bytes(self, chunks: Iterable[bytes], levels: Sequence[str]) -> int:
        going = [level for level in exact() if level not in levels]
        with self.store.snapshot() as snapshot:
            return sum(size for chunk in chunks for name, size in level_bytes(snapshot, chunk).items() if name in going)

    def _compact(self) -> None:
        try:
            self.writer.compact()
        except NoSpaceError as error:
            self._warn(f"the data file is as long as before: {error.message}", "run `kvtool store compact` later")

    # ---- what to work on ----

    def _chunks(self) -> list[bytes]:
        known = [chunk for chunk in self.store.chunk_ids() if chunk != self.identity.prefix_id]
        if not self.options.chunks:
            return known
        return list(dict.fromkeys(chunk_named(text, known) for text in self.options.chunks))

    def _exact(self, chunks: Sequence[bytes]) -> list[tuple[bytes, str]]:
        levels = ((chunk, exact_level(self.store, chunk)) for chunk in chunks)
        return [(chunk, level) for chunk, level in levels if level is not None]

    def _own(self, chunks: Sequence[bytes]) -> list[bytes]:
        """Foreign chunks count only where there are no others: they have no say in how own KV is compressed."""
        foreign = self.store.foreign_chunks()
        return [chunk for chunk in chunks if chunk not in foreign] or list(chunks)

    def _load(self) -> None:
        if not self.session.model.is_loaded:
            self.events.status(f"loading {self.options.model or self.identity.model}")
            _ = self.session.decoder

    # ---- the profile ----

    def _profile(self, chunks: Sequence[bytes]) -> Profile | None:
        made = None
        if self.options.fit:
            made = self._fitted(chunks)
        elif self.options.profile is not None:
            made = profile_of(self.options.profile, self.identity.fingerprint)
        if made is not None:
            keep_profile(self.store, self.writer, made)
        profile = made if made is not None else self.session.profiles.current()
        if profile is not None:
            size, groups = len(profile.data), profile.layout.groups
            self.report.profile = {"digest": profile.digest.hex(), "bytes": size, "groups": groups, **profile.about}
        return profile

    def _fitted(self, chunks: Sequence[bytes]) -> Profile:
        exact = self._exact(self._own(chunks))
        if not exact:
            if next(self.store.files(), None) is None:
                raise NoDocumentsError
            raise KvtoolError("no exact record is left to fit a profile on", "ingest the documents again")
        self._load()
        self.report.fitted = True
        sample = random.Random(_SEED).sample(exact, min(FIT_CHUNKS, len(exact)))
        return fit(self.session, sample, self.options.fit_prompts, self.events)

    # ---- the loss ----

    def _losses(
        self, levels: Sequence[str], profile: Profile | None, chunks: Sequence[bytes]
    ) -> dict[str, dict[str, float]]:
        maker = profile.digest.hex() if profile is not None else NO_PROFILE.hex()
        rows = dict(self.store.codec_state().get("losses") or {})
        known = dict(rows.get(maker, {}))
        wanted = [level for level in lossy([*levels, *self._offered(levels)]) if level not in known]
        if wanted and self.options.questions:
            known |= self._measured(wanted, profile, chunks)
            self.writer.set_codec_state(self.store.codec_state() | {"losses": rows | {maker: known}})
        return known

    def _measured(
        self, levels: Sequence[str], profile: Profile | None, chunks: Sequence[bytes]
    ) -> dict[str, dict[str, float]]:
        own = self._own(chunks)
        sample = random.Random(_SEED + 1).sample(own, min(FIT_CHUNKS, len(own)))
        self._load()
        prompts = own_prompts(self.session, self._exact(sample), self.options.questions)
        if not prompts:
            self._warn("no exact record is left to measure the loss on", "ingest the documents again")
            return {}
        self.events.step("measure the loss", len(prompts), "questions")
        schemes = {level: LevelScheme(level, profile, self.heavy) for level in levels}
        rows = []
        for prompt in prompts:
            rows.append(measure(self.session, prompt, schemes))
            self.events.advance(1)
        return {level: mean_loss([row[level] for row in rows]) for level in levels}

    def _offered(self, levels: Sequence[str]) -> list[str]:
        offered = [level for level in whole() if not level_of(level).baseline]
        return lossy(keeping(level, self.options.share) for level in offered) if AUTO in levels else []

    def _chosen(self, levels: list[str], losses: dict[str, dict[str, float]]) -> list[str]:
        """Replace `auto` by the smallest level that may be taken, which is a lossless one where none may."""
        if AUTO not in levels:
            return levels
        allowed = [
            level
            for level in self._offered(levels)
            if losses.get(level, {}).get("kl_answer", 1e9) <= self.options.allowed_loss
        ]
        chosen = (allowed or exact())[-1]
        if not allowed:
            self._warn(f"no level loses as little as {self.options.allowed_loss:g} nats", f"taking {chosen}")
        return list(dict.fromkeys([chosen, *(level for level in levels if level != AUTO)]))

    def _warn(self, text: str, hint: str) -> None:
        self.report.warnings.append(text)
        self.events.warn(text, hint)
