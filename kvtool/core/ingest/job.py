"""Steps of an ingest: store the texts of all changed files, remove deleted ones, update the index; then compute KV."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.store import Store, making
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import RAW, check_level, level_of
from kvtool.core.common.types import Events, Warn
from kvtool.core.corpus.reading import Reading
from kvtool.core.errors import BudgetError, DamagedError, ModelError, StoreNotFoundError, UsageError
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.report import (
    Account,
    Forecast,
    IngestReport,
    free_bytes,
    kv_bytes_a_token,
    left_of,
    seconds_a_token,
)
from kvtool.core.ingest.stream import Choices, NewChunks, Stream, Texts
from kvtool.core.ingest.survey import PreparedFile
from kvtool.core.session.due import DueChunk, due, specs_of
from kvtool.core.session.identity import MeasuredLosses

if TYPE_CHECKING:
    from kvtool.core.ingest.storer import Storer
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.retrieval.finder import Finder
    from kvtool.core.session.session import Session


_NO_KV = (
    "the model keeps a recurrent state, so no KV of chunks is computed now",
    "what a question computes of its prompt is stored, and the next one with the same beginning reuses it",
)
_GATE_CHUNKS = 3  # it takes no more


@dataclass(slots=True)
class KeptModel:
    decoder: Decoder | None = None


def ingest(
    path: Path, options: IngestOptions, events: Events | None = None, kept: KeptModel | None = None
) -> IngestReport:
    """Bring a store up to date with files.

    Only changed files are parsed, and a model is loaded only if a chunk has to be computed. Texts can be asked as soon
    as all are stored, before the KV of their chunks is. The next run continues an interrupted one.
    A model that is loaded here is left in `kept`. Raises UsageError, ModelError, and the errors of `core/cache`.
    """
    check_level(options.level)
    if options.embedder is not None:
        from kvtool.core.retrieval.embed import embedder_of

        embedder_of(options.embedder, options.offline)  # before anything is computed
    started = time.perf_counter()
    events = events or Events()
    with options.reading as reading:
        job_of = partial(_Job, path, options, events, reading, kept or KeptModel())
        report = _preview(path, job_of) if options.dry_run else _run(path, options, job_of, events.say)
    report.seconds = time.perf_counter() - started
    return report


def _preview(path: Path, job_of: Callable[[Store | None], _Job]) -> IngestReport:
    try:
        with Store.open(path) as store:
            return job_of(store).preview()
    except StoreNotFoundError:
        return job_of(None).preview()


def _run(path: Path, options: IngestOptions, job_of: Callable[[Store | None], _Job], say: Warn) -> IngestReport:
    """Run; a store is created only once a file can be read: a mistyped path, model or address creates none.

    One process at a time makes a store, so that the next one takes the model that this one has chosen.
    """
    if options.ray:
        from kvtool.core.ingest.ray_storer import check_reachable

        check_reachable(options.ray)
    with contextlib.ExitStack() as held:
        first = None
        if is_new(path):
            held.enter_context(making(path, options.lock_wait, say))
            if is_new(path):  # the process that was waited for has made none
                first = job_of(None)
                first.stream.begin()
        store = held.enter_context(Store.create_or_open(path))
        writer = held.enter_context(store.writer(options.lock_wait, options.max_size, say))
        job = job_of(store)
        if first is not None and job.choices.known is None:
            job, first.stream.seen.store = first, store
        return job.run(store, writer)


def create(path: Path, options: IngestOptions) -> None:
    """Create a store without documents, made as an ingest with these options would make it. Raises ModelError."""
    manifest = Choices(None, options).identity.to_manifest()  # before there is a folder
    with Store.create_or_open(path) as store, store.writer(options.lock_wait) as writer:
        if not store.manifest():
            writer.set_manifest(manifest)


def is_new(path: Path) -> bool:
    try:
        Store.open(path).close()
    except StoreNotFoundError:
        return True
    except DamagedError:
        pass  # `create_or_open` completes what a killed run began, or raises
    return False


class _Job:
    def __init__(
        self, path: Path, options: IngestOptions, events: Events, reading: Reading, kept: KeptModel, store: Store | None
    ) -> None:
        self.options, self._path, self._model = options, path, kept
        self.account = Account(options, events)
        self.choices = Choices(store, options, self.account.phase)
        self.stream = Stream(store, options, self.choices, self.account, reading)
        self._changed = False  # whether any file did
        self._kept = False  # whether the store knows what it is made with
        self._session: Session | None = None  # once the model is needed
        self._first: list[ChunkSpec] = []  # for the gate

    def preview(self) -> IngestReport:
        report, store = self.account.report, self.stream.store
        self.stream.begin()
        new_chunks, identity = NewChunks(store), self.choices.identity
        missing: dict[bytes, int] = {}  # tokens, by chunk
        paths = set[str]()
        for file in self.stream:
            self.account.count_file(file)
            paths.add(file.entry.path)
            missing |= {chunk.chunk_id: len(chunk.ids) for chunk in new_chunks.of(file)}
        paths |= {entry.path for entry in self.stream.gone}
        if not identity.keeps_states:
            missing |= {} if store is None else {chunk.chunk_id: chunk.tokens for chunk in due(store, identity, paths)}
            report.chunks.computed, report.tokens = len(missing), sum(missing.values())
        report.forecast = self._forecast(store, report.tokens)
        report.chunks.reused = new_chunks.reused
        report.documents.removed = sum(len(entry.documents) for entry in self.stream.gone)
        if paths:
            report.chunks.removed = new_chunks.orphaned(paths, identity.prefix_id)
        return report

    def run(self, store: Store, writer: Writer) -> IngestReport:
        started, whole, report = time.perf_counter(), False, self.account.report
        try:
            self.stream.begin()
            self._store_texts(store, writer)
            whole = True
        finally:
            self.stream.seen.keep(store, whole)
        report.phase["texts"] = ended = time.perf_counter() - started
        if not self.choices.identity.keeps_states:
            self._store_kv(store, writer)
            report.ready = 1.0 if report.left is None else 1 - report.left.chunks / len(store.chunk_ids())
            report.phase["kv"] = time.perf_counter() - started - ended
        if self._session is not None:
            with self.account.phase("gate"):
                self._gate(self._session)
        if report.chunks.computed:
            exact = level_of(self.options.level).lossless
            report.loss = 0.0 if exact else MeasuredLosses(store).of_new(self.options.level)
        return report

    # ---- texts ----

    def _store_texts(self, store: Store, writer: Writer) -> None:
        """Commit the texts of changed files, remove those that are gone, and bring the index of words up to date: from
        here on all of them can be asked."""
        options, identity = self.options, self.choices.identity
        self._say_lead_in_change(store)
        if identity.keeps_states and options.ray:
            raise UsageError("chunks of a model that keeps states are computed in this process", "leave --ray out")
        if identity.keeps_states and self.choices.known is None:
            self.account.warn(*_NO_KV)
        self._take_files(store, writer)
        self._keep_identity(writer)
        for entry in self.stream.gone:
            writer.remove_file(entry.path)
            self.account.removed(entry)
        fewer = self._changed or self._is_other or bool(self.stream.gone)
        if (stale := fewer or not store.is_collected()) or options.embedder is not None:
            self._collect(store, writer, stale)

    def _take_files(self, store: Store, writer: Writer) -> None:
        new_chunks, texts = NewChunks(store), Texts(writer, self.account, self._keep_identity)
        prefix, limits = self.choices.identity.wanted_prefix, None
        try:
            for file in self.stream:
                longest, layers = limits = limits or self._limits()
                if self._fits(file, longest):
                    described = [prefix] * (not self._changed and layers > 0 and bool(prefix.ids))
                    described += new_chunks.of(file)
                    self._changed = True
                    texts.add(file, {chunk.chunk_id: chunk.info(layers) for chunk in described})
        finally:
            self.account.report.chunks.reused = new_chunks.reused
            texts.commit()

    def _limits(self) -> tuple[int, int]:
        """Return the longest chunk with the text before it, in tokens, and how many layers of it are stored."""
        from kvtool.core.checkpoint.load import supported_config
        from kvtool.core.checkpoint.support import context_limit, kv_layers

        identity, config = self.choices.identity, supported_config(self.choices.files)
        longest = context_limit(config) - len(identity.lead_in.ids)
        return longest, 0 if identity.keeps_states else kv_layers(config)

    def _fits(self, file: PreparedFile, longest: int) -> bool:
        """If the model cannot hold a file's chunks, only this file fails; the store's settings do not change for it."""
        length = max((len(chunk.before) + len(chunk.ids) for chunk in file.chunks), default=0)
        if length > longest and not self.choices.identity.keeps_states:
            lead_in = len(self.choices.identity.lead_in.ids)
            text = f"a chunk and its lead-in have {lead_in + length} tokens, the model takes {lead_in + longest}"
            hint = "use a shorter --lead-in or fewer --chunk-tokens"
            if self._is_other and not self._changed:
                raise UsageError(text, hint)
            self.stream.fail(file.entry.path, f"{text}: {hint}")
            return False
        return True

    @property
    def _is_other(self) -> bool:
        return self.choices.known != self.choices.identity or self.choices.made_by.is_foreign

    def _keep_identity(self, writer: Writer) -> None:
        if self._is_other and not self._kept:
            writer.set_manifest(self.choices.identity.to_manifest())
            if self.choices.made_by.is_foreign:  # a profile and losses of foreign records only, if any
                writer.set_codec_state({})
        self._kept = True

    def _say_lead_in_change(self, store: Store) -> None:
        identity = self.choices.identity
        known, replaced = self.choices.known, self.choices.replaced
        read = {file.name for file in self.stream.walked.files} | {entry.path for entry in self.stream.gone}
        if replaced is not None and any(entry.path not in read for entry in store.files()):
            text = f"the model changes from {replaced.model} to {identity.model}; other documents get no KV"
            self.account.warn(text, "ingest the other documents again, too")
        if known is None or known.lead_in == identity.lead_in:
            return
        text, hint = f"from {known.lead_in.mode!r} to {identity.lead_in.mode!r}: chunks are made anew", ""
        if any(entry.path not in read for entry in store.files()):
            text += "; those of other documents keep theirs, and are found as before"
            hint = "ingest the other documents again to give them the new one, too"
        self.account.warn(f"the lead-in changes {text}", hint)

    # ---- KV ----

    def _store_kv(self, store: Store, writer: Writer) -> None:
        options, report, chunks = self.options, self.account.report, due(store, self.choices.identity)
        if options.lazy or options.compute_for == 0:
            report.left = left_of(chunks, "lazy" if options.lazy else "time") if chunks else None
            return
        if not (chunks or self._needs_prefix(store)):
            return
        ahead = report.forecast = self._forecast(store, sum(chunk.tokens for chunk in chunks))
        if ahead is not None and ahead.is_noted:
            self.account.events.say(ahead.text(), ahead.advice())
        storer, reason = None, "size"
        try:
            writer.require_room(self._least_bytes(chunks))  # a model is seconds to load
            storer = self._storer(store, writer)
            reason = self._compute(store, storer, chunks)
        except BudgetError as error:
            self.account.warn(f"{error.message}: no more KV is stored", error.hint)
        finally:
            if storer is not None:
                storer.close()
            writer.flush()
            if report.tokens:
                self.account.remember_speed(store, self.choices.identity.fingerprint)
        stored = {*store.ids_here()} if chunks else set[bytes]()
        if rest := [chunk for chunk in chunks if chunk.chunk_id not in stored]:
            report.left = left_of(rest, reason)
            report.chunks.computed = len(chunks) - len(rest)  # the last ones may not have fitted
            report.tokens = sum(chunk.tokens for chunk in chunks) - report.left.tokens

    def _least_bytes(self, chunks: Sequence[DueChunk]) -> int:
        """Return the bytes of the smallest chunk's KV, where they are known before it is computed."""
        if self.options.level != RAW or not chunks:
            return 1
        identity = self.choices.identity
        return min(chunk.tokens for chunk in chunks) * kv_bytes_a_token(self.choices.files.folder, identity.dtype)

    def _compute(self, store: Store, storer: Storer, chunks: Sequence[DueChunk]) -> str:
        """Compute and store chunks; return why some are left: `time`, `changes`, or `damage` of their descriptions."""
        if not chunks:
            return "damage"
        identity = self.choices.identity
        self._first = [*specs_of(store, identity, chunks[:_GATE_CHUNKS])]
        limit, is_over = self.options.compute_for, self.account.events.is_over
        until = math.inf if limit is None else time.monotonic() + limit
        self.account.begin_computing(sum(chunk.tokens for chunk in chunks))
        stopped = storer.store(specs_of(store, identity, chunks), lambda: time.monotonic() >= until or is_over())
        return "damage" if not stopped else "time" if time.monotonic() >= until else "changes"

    def _forecast(self, store: Store | None, tokens: int) -> Forecast | None:
        if not tokens or self.choices.identity.keeps_states:
            return None
        identity = self.choices.identity
        size = tokens * kv_bytes_a_token(self.choices.files.folder, identity.dtype)
        each = seconds_a_token(store, identity.fingerprint, self.options)
        seconds = None if each is None else tokens * each
        return Forecast(tokens, size, seconds, free_bytes(self._path), self.options.level)

    def _needs_prefix(self, store: Store) -> bool:
        identity = self.choices.identity
        return bool(identity.prefix) and not store.serves_own(identity.prefix_id)

    def _storer(self, store: Store, writer: Writer) -> Storer:
        storer = self._started_storer(store, writer)
        try:
            if self._needs_prefix(store):
                with self.account.phase("lead_in"):
                    storer.store_prefix(self.choices.identity.wanted_prefix)
        except BaseException:
            storer.close()
            raise
        return storer

    def _started_storer(self, store: Store, writer: Writer) -> Storer:
        options, choices = self.options, self.choices
        with self.account.phase("model_load", reported=False):
            if options.ray:
                from kvtool.core.ingest.ray_storer import RayStorer

                return RayStorer(store, writer, self.account, options, choices)
            session = self._session = self._open(store)
            from kvtool.core.ingest.storer import ChunkStorer
        decoder = session.decoder
        profile = session.profiles.current() if level_of(options.level).nested else None
        with self.account.phase("lead_in"), decoder.turns.turn():
            lead_ins = session.lead_ins
        return ChunkStorer(writer, self.account, decoder, lead_ins, options.level, profile)

    # ---- the model ----

    def _open(self, store: Store) -> Session:
        from kvtool.core.session.session import Session

        identity, events, decoder = self.choices.identity, self.account.events, self._model.decoder
        if decoder is not None and decoder.loaded.fingerprint != identity.fingerprint:
            decoder = None
        if decoder is None:
            events.status(f"loading {self.choices.files.ref}")
        session = Session.open(store, self.options, identity=identity, decoder=decoder)
        self._model.decoder = session.decoder
        loaded = session.decoder.loaded
        self.account.resolve(identity, loaded.files.ref, loaded.device, loaded.arithmetic.dtype)
        events.status(f"{loaded.files.ref} on {loaded.device} in {loaded.arithmetic.dtype}")
        return session

    def _gate(self, session: Session) -> None:
        from kvtool.core.session.gate import gate_store

        with session.decoder.turns.turn():
            chunks = [chunk.ids for chunk in self._first]
            verdict = gate_store(session.store, session.decoder, session.identity, chunks)
        if verdict is not None:
            self.account.report.gate = verdict.to_json()
            if not verdict.passed:
                self.account.events.warn(
                    "the gate failed: fused answers of this model will be refused", "kvtool inspect gate"
                )

    # ---- the index ----

    def _collect(self, store: Store, writer: Writer, stale: bool) -> None:
        """Remove chunks that no document refers to, and update the index. Raises DamagedError."""
        from kvtool.core.retrieval.finder import Finder

        finder = Finder(store, self.account.warn)

        def referred(chunk_ids: Collection[bytes]) -> Collection[bytes]:
            with self.account.phase("index"):
                return finder.index.holders(chunk_ids)

        if stale:
            keep = [self.choices.identity.prefix_id]
            self.account.report.chunks.removed = writer.collect(keep=keep, referred=referred)
        with self.account.phase("index"), contextlib.suppress(DamagedError):  # `verify` and a query report it
            if len(finder.index):
                self._embed(finder, store)

    def _embed(self, finder: Finder, store: Store) -> None:
        """Update the vectors, if there are any or an embedder is given. Raises ModelError."""
        from kvtool.core.retrieval.embed import remembered

        asked = self.options.embedder
        if (ref := asked or remembered(store, self.account.warn)) is None:
            return
        self.account.events.status(f"vectors by {ref}")
        try:
            finder.embed(ref, self.options.offline)
        except ModelError as error:
            if asked is not None:
                raise
            self.account.warn(f"no vectors: {error.message}", error.hint)
