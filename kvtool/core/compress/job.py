"""The order of a compression: profile, loss, levels, encode, read back, drop."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvtool.core.cache.identity import chunk_named
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import (
    DEFAULT_LOSSY,
    NO_PROFILE,
    enough_loss,
    exact,
    keeping,
    level_of,
    lossy,
    profiled,
    whole,
)
from kvtool.core.codec.profile import Profile
from kvtool.core.common.types import Events
from kvtool.core.compress.fitting import fit, keep_profile, profile_of
from kvtool.core.compress.level_writer import LevelWriter
from kvtool.core.compress.loss import HeavyRows, LevelScheme, mean_loss, measure, own_prompts
from kvtool.core.compress.options import AUTO, CompressOptions
from kvtool.core.compress.report import CompressReport
from kvtool.core.errors import KvtoolError, NoDocumentsError, NoSpaceError, UsageError
from kvtool.core.model.decoder import Decoder
from kvtool.core.records.read import exact_level
from kvtool.core.session.identity import smallest_allowed
from kvtool.core.session.session import Session
from kvtool.core.upkeep.inventory import level_bytes

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
