"""The order of a compression: profile, loss, levels, encode, read back, drop."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.cache.identity import chunk_named
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import DEFAULT_LOSSY, exact, level_of, lossy
from kvtool.core.codec.nested import NO_PROFILE
from kvtool.core.common.progress import Events
from kvtool.core.compress.compress_report import CompressReport
from kvtool.core.compress.options import AUTO, CompressOptions
from kvtool.core.errors import DamagedError, KvtoolError, ModelError, NoSpaceError, UsageError
from kvtool.core.session.identity import StoreIdentity
from kvtool.core.session.levels import ProfileShelf, losses_by_maker

if TYPE_CHECKING:
    from kvtool.core.codec.profile import Profile
    from kvtool.core.compress.loss import Question
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.session.session import Session

FIT_CHUNKS = 64
_SEED = 0


def compress(
    path: Path, options: CompressOptions, events: Events | None = None, decoder: Decoder | None = None
) -> CompressReport:
    """Encode a store's records at some levels. What is there already stays; run again to resume.

    Parameters
    ----------
    decoder : the store's model if it is loaded already; a profile is fitted with one that gives gradients.

    Raises
    ------
    UsageError : an unknown level or chunk, or nothing to choose by.
    KvtoolError : `fit` without a single exact record.
    StoreNotFoundError, StoreLockedError, NoSpaceError, ModelError : see the rooms they come from.
    """
    levels = check_levels(options)
    started = time.perf_counter()
    with Store.open(path) as store, store.writer(options.lock_wait, options.max_size) as writer:
        report = _Job(store, writer, options, events or Events(), decoder).run(levels)
    report.seconds = time.perf_counter() - started
    return report


def check_levels(options: CompressOptions) -> list[str]:
    """The levels that are asked for, each once; `auto` by itself.

    Raises
    ------
    UsageError : there is no such level, or it is none that records are compressed to.
    """
    levels = list(dict.fromkeys(options.levels)) or [AUTO if options.max_loss is not None else DEFAULT_LOSSY]
    for level in levels:
        if level_of(level).verbatim:
            raise UsageError(f"{level} is what there is before compression", f"leave --level {level} out")
    if options.max_loss is not None and AUTO not in levels:
        raise UsageError("--max-loss chooses a level, and one is named", "leave --level out, or add --level auto")
    if AUTO in levels and options.questions == 0:
        raise UsageError("--level auto needs a measured loss", "leave --questions 0 out, or name a level")
    return levels


@dataclass
class _Job:
    store: Store
    writer: Writer
    options: CompressOptions
    events: Events
    decoder: Decoder | None = None

    def __post_init__(self) -> None:
        from kvtool.core.session.identity import store_identity

        self.report = CompressReport()
        self.identity: StoreIdentity = store_identity(self.store)
        self.shelf = ProfileShelf(self.store)

    def run(self, levels: list[str]) -> CompressReport:
        """All of it."""
        from kvtool.core.compress.encode import Encoder

        self.report.bytes_before = self.store.stats()["bytes"]
        chunks = self._chunks()
        profile = self._profile(levels, chunks)
        losses = self._losses(levels, profile, chunks)
        levels = self._chosen(levels, losses)
        Encoder(self.store, self.writer, self.shelf, profile, self.options, self.report, self.events).run(
            chunks, levels
        )
        for row in self.report.levels:
            row.loss = losses.get(row.level, {})
        self.report.bytes_after = self.store.stats()["bytes"]
        if self.report.dropped:
            self._compact()
        return self.report

    def _compact(self) -> None:
        """Give the pages of what was dropped back to the disk."""
        try:
            self.report.compacted = self.writer.compact()
        except NoSpaceError as error:
            self._warn(f"the data file is as long as before: {error.message}", "run `kvtool store compact` later")

    # ---- what to work on ----

    def _chunks(self) -> list[bytes]:
        """The chunks that are asked for. The prompt's own beginning is left alone: it is exact in every prompt."""
        known = [chunk for chunk in self.store.chunk_ids() if chunk != self.identity.prefix_id]
        if not self.options.chunks:
            return known
        return list(dict.fromkeys(chunk_named(text, known) for text in self.options.chunks))

    def _exact(self, chunks: Sequence[bytes]) -> Iterator[tuple[bytes, str]]:
        from kvtool.core.records.reading import exact_level

        for chunk in chunks:
            level = exact_level(self.store, chunk)
            if level is not None:
                yield chunk, level

    @cached_property
    def session(self) -> Session:
        """The store with its model loaded."""
        from kvtool.core.session.session import Session

        if self.decoder is not None and not self.options.fit:
            return Session(self.store, self.identity, self.options, decoder=self.decoder)
        self.events.status(f"loading {self.options.model or self.identity.model}")
        return Session.open(self.store, self.options, gradients=True)

    # ---- the profile ----

    def _profile(self, levels: Sequence[str], chunks: Sequence[bytes]) -> Profile | None:
        if self.options.fit:
            profile: Profile | None = self._fitted(chunks)
        elif self.options.profile is not None:
            profile = self._taken(self.options.profile)
        else:
            profile = self.shelf.current()
        if self.options.predictor != AUTO:
            profile = None
        elif profile is None and not all(level_of(level).lossless for level in levels):
            self._warn("no profile is fitted: records will be about twice as large as they could be", "add --fit once")
        if profile is not None:
            self.report.profile = {
                "digest": profile.digest.hex(),
                "bytes": len(profile.data),
                "groups": profile.layout.groups,
                **profile.about,
            }
        return profile

    def _fitted(self, chunks: Sequence[bytes]) -> Profile:
        from kvtool.core.compress.fitting import fit

        exact = list(self._exact(chunks))
        if not exact:
            raise KvtoolError("no exact record is left to fit a profile on", "ingest the documents again")
        sample = random.Random(_SEED).sample(exact, min(FIT_CHUNKS, len(exact)))
        profile = fit(self.session, self.store, sample, self.events)
        self._keep(profile)
        return profile

    def _taken(self, path: Path) -> Profile:
        """Another store's profile."""
        from kvtool.core.session.identity import store_identity

        with Store.open(path) as other:
            if store_identity(other).fingerprint != self.identity.fingerprint:
                raise ModelError(f"the store at {path} is another model's", "fit a profile here with --fit")
            profile = ProfileShelf(other).current()
        if profile is None:
            raise KvtoolError(f"the store at {path} has no profile", "make one there with `kvtool compress --fit`")
        self._keep(profile)
        return profile

    def _keep(self, profile: Profile) -> None:
        state, digest = self.store.codec_state(), profile.digest.hex()
        if state.get("profile") != digest:
            state = state | {"profile": digest, "losses": losses_by_maker(state)}
        elif self._has(profile):
            return
        self.writer.put_profile(profile.digest, profile.data, state)

    def _has(self, profile: Profile) -> bool:
        try:
            return self.store.profile(profile.digest) is not None
        except DamagedError:
            return False

    # ---- the loss ----

    def _losses(
        self, levels: Sequence[str], profile: Profile | None, chunks: Sequence[bytes]
    ) -> dict[str, dict[str, float]]:
        """What is known of the lossy levels; measured where nothing is, and kept in the store."""
        maker = profile.digest.hex() if profile is not None else NO_PROFILE.hex()
        mine = self.options.predictor == AUTO
        rows = losses_by_maker(self.store.codec_state())
        known = dict(rows.get(maker, {})) if mine else {}
        wanted = [level for level in (lossy() if AUTO in levels else lossy(levels)) if level not in known]
        if wanted and self.options.questions:
            known |= self._measured(wanted, profile, chunks)
            if mine:
                self.writer.set_codec_state(self.store.codec_state() | {"losses": rows | {maker: known}})
        if not mine and lossy(levels):
            self.writer.set_codec_state(self.store.codec_state() | {"named_predictor": True})
        return known

    def _measured(
        self, levels: Sequence[str], profile: Profile | None, chunks: Sequence[bytes]
    ) -> dict[str, dict[str, float]]:
        from kvtool.core.compress.loss import LevelScheme, mean_loss, measure
        from kvtool.core.compress.prompts import own_prompts

        session = self.session
        decoder = session.decoder
        sample = random.Random(_SEED + 1).sample(list(chunks), min(FIT_CHUNKS, len(chunks)))
        prompts: list[Question] = own_prompts(session, self.store, list(self._exact(sample)), self.options.questions)
        if not prompts:
            self._warn("no exact record is left to measure the loss on", "ingest the documents again")
            return {}
        self.events.step("measure the loss", len(prompts), "questions")
        count = len(decoder.layers)
        schemes = {level: LevelScheme(level, profile, self.options.predictor, count) for level in levels}
        rows = measure(session, prompts, schemes, self.events.advance)
        return {level: mean_loss(rows[level]) for level in levels}

    def _chosen(self, levels: list[str], losses: dict[str, dict[str, float]]) -> list[str]:
        """The levels with `auto` replaced by the smallest that may be taken, which is a lossless one where none may."""
        if AUTO not in levels:
            return levels
        allowed = [one for one in lossy() if losses.get(one, {}).get("kl_answer", 1e9) <= self.options.allowed_loss]
        chosen = (allowed or exact())[-1]
        if not allowed:
            self._warn(f"no level loses as little as {self.options.allowed_loss:g} nats", f"taking {chosen}")
        return list(dict.fromkeys([chosen, *(level for level in levels if level != AUTO)]))

    def _warn(self, text: str, hint: str) -> None:
        self.report.warnings.append(text)
        self.events.warn(text, hint)
