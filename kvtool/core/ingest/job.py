"""The order of an ingest: survey, split, compute what is missing, commit, forget what is gone."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.entries import FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import check_level, level_of
from kvtool.core.common.progress import Events
from kvtool.core.corpus.split import SplitSettings
from kvtool.core.corpus.walk import Walked, find_files, places
from kvtool.core.errors import DamagedError, KvtoolError, ModelError, StoreNotFoundError, UsageError
from kvtool.core.ingest.ingest_report import IngestReport
from kvtool.core.ingest.options import IngestOptions, is_lead_in_file
from kvtool.core.ingest.prepare import PreparedFile, prepare
from kvtool.core.ingest.survey import Survey, is_below, reason_of, survey
from kvtool.core.model.files import ModelFiles, resolve
from kvtool.core.model.fingerprint import model_fingerprint
from kvtool.core.model.options import DEFAULT_MODEL
from kvtool.core.records.wanted import WantedChunk
from kvtool.core.session.identity import LeadInIds, StoreIdentity, check_same_model
from kvtool.core.session.lead_in import LEARNED, learned_lead_in, open_lead_ins
from kvtool.core.session.levels import ProfileShelf

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.retrieval.finder import Finder


def ingest(path: Path, options: IngestOptions, events: Events | None = None) -> IngestReport:
    """Bring a store up to date with files.

    Only what changed is read further than its bytes; a model is loaded only if a chunk has to be computed.

    Parameters
    ----------
    path : folder of the store; made on need, not on a dry run.

    Raises
    ------
    UsageError : a path does not exist, or nothing at all could be read.
    ModelError : the store was built with another model.
    StoreLockedError, NoSpaceError, StoreFormatError : see `core/cache`.
    """
    check_level(options.level)
    if options.embedder is not None:
        from kvtool.core.retrieval.embed import Embedder

        Embedder(options.embedder, options.offline)  # before anything is computed
    started = time.perf_counter()
    if options.dry_run:
        try:
            with Store.open(path) as store:
                report = _Job(store, options, events or Events()).preview()
        except StoreNotFoundError:
            report = _Job(None, options, events or Events()).preview()
    else:
        report = _run(path, options, events or Events())
    report.seconds = time.perf_counter() - started
    return report


def _run(path: Path, options: IngestOptions, events: Events) -> IngestReport:
    """A store is made only for something: a mistyped path or model leaves none behind."""
    first = _Job(None, options, events) if _is_new(path) else None
    if first is not None:
        _ = first.found
    with Store.create_or_open(path) as store, store.writer(options.lock_wait, options.max_size) as writer:
        job = _Job(store, options, events)
        if first is not None and job.known is None:
            job, first.store = first, store
        return job.run(writer)


def _is_new(path: Path) -> bool:
    try:
        Store.open(path).close()
    except StoreNotFoundError:
        return True
    except DamagedError:
        pass  # `create_or_open` completes what a killed run began, or says what is wrong
    return False


@dataclass
class _Job:
    store: Store | None
    options: IngestOptions
    events: Events

    def __post_init__(self) -> None:
        self.report = IngestReport(dry_run=self.options.dry_run)
        self.known = StoreIdentity.from_manifest(self.store.manifest()) if self.store is not None else None

    # ---- what the store is made with ----

    @cached_property
    def files(self) -> ModelFiles:
        return resolve(
            self.options.model or (self.known.model if self.known else DEFAULT_MODEL), offline=self.options.offline
        )

    @cached_property
    def tokenizer(self) -> Any:
        from kvtool.core.model.load import load_tokenizer

        return load_tokenizer(self.files)

    @cached_property
    def identity(self) -> StoreIdentity:
        """The store's own identity with what the options change; made anew for a new store."""
        split = self.options.splitting or (self.known.split if self.known else SplitSettings())
        if self.known is None:
            return self._new_identity(split)
        check_same_model(self.files, self.known, self.options.dtype)
        if self._lead_in(self.known) == (self.known.lead_in.mode, self.known.system) and not self._reads_lead_in():
            return replace(self.known, split=split)
        return self._new_identity(split)

    def _reads_lead_in(self) -> bool:
        """Whether the lead-in was asked for as a file, which may hold another text by now, or as what was learned."""
        asked = self.options.lead_in
        return asked is not None and (asked == LEARNED or is_lead_in_file(asked))

    def _lead_in(self, known: StoreIdentity | None) -> tuple[str, str]:
        mode = self.options.lead_in or (known.lead_in.mode if known else "warm")
        if is_lead_in_file(mode):
            mode = str(Path(mode).expanduser().absolute())
        system = self.options.system if self.options.system is not None else (known.system if known else "")
        return mode, system

    def _new_identity(self, split: SplitSettings) -> StoreIdentity:
        from kvtool.core.model.lead_in import lead_in_ids
        from kvtool.core.model.load import resolve_device, resolve_dtype, supported_config
        from kvtool.core.model.prompt import DEFAULT_SYSTEM, PromptParts, prompt_parts

        if self.known is None:  # refused before a store is made for it
            supported_config(self.files)
        mode, system = self._lead_in(self.known)
        dtype = self.known.dtype if self.known else ""
        dtype = dtype or resolve_dtype(self.options.dtype, resolve_device(self.options.device), self.files)
        if self.known and system == self.known.system:  # a template that tells the date says another one today
            parts = PromptParts(self.known.prefix, self.known.answer_header)
        else:
            parts = prompt_parts(self.tokenizer, system or DEFAULT_SYSTEM)
        fingerprint, ids = model_fingerprint(self.files, dtype), lead_in_ids(mode, self.tokenizer, parts)
        learned = mode == LEARNED
        return StoreIdentity(
            model=self.files.ref,
            fingerprint=fingerprint,
            dtype=dtype,
            prefix=parts.prefix,
            answer_header=parts.answer_header,
            lead_in=learned_lead_in(self.store, fingerprint, ids) if learned else LeadInIds(mode, ids),
            split=split,
            system=system,
        )

    # ---- the work ----

    def preview(self) -> IngestReport:
        """What a run would do; nothing is computed or written."""
        found = self.found
        prepared = self._prepare(found)
        missing = self._missing(prepared)
        self._count_plan(prepared, missing)
        documents = self.report.documents
        for file in prepared:
            documents.added += len(file.documents) if file.is_new else 0
            documents.changed += 0 if file.is_new else len(file.documents)
        documents.removed = sum(len(entry.documents) for entry in found.gone)
        self.report.chunks.computed = len(missing)
        self.report.tokens = sum(len(chunk.ids) for chunk in missing.values())
        return self.report

    def run(self, writer: Writer) -> IngestReport:
        """Survey, compute, commit."""
        assert self.store is not None
        found = self.found
        prepared = self._prepare(found)
        self._say_lead_in_change(prepared, found.gone)
        missing = self._missing(prepared)
        self._count_plan(prepared, missing)
        decoder = self._decoder_for(missing)
        if self.known != self.identity:
            writer.set_manifest(self.identity.to_manifest())
        self._store(prepared, missing, decoder, writer)
        for entry in found.gone:
            writer.remove_file(entry.path)
            self.report.documents.removed += len(entry.documents)
        if prepared or found.gone or self.known != self.identity or not self.store.is_collected():
            self.report.chunks.removed = writer.collect(keep=[self.identity.prefix_id])
            self._index()
        elif self.options.embedder is not None:
            self._index()
        if decoder is not None:
            self._gate(decoder, missing)
        return self.report

    def _index(self) -> None:
        """Bring the retrieval index up to date, and the vectors if there are any, so that no question has to."""
        from kvtool.core.retrieval.finder import Finder
        from kvtool.core.retrieval.vectors import remembered

        assert self.store is not None
        finder = Finder(self.store, self._warn)
        with suppress(DamagedError):  # of a document that was there before: `store verify` tells, and so does a query
            index, ref = finder.index, self.options.embedder or remembered(self.store, self._warn)
            if ref is not None and len(index):
                self.events.status(f"vectors by {ref}")
                self._embed(finder, ref)

    def _embed(self, finder: Finder, ref: str) -> None:
        try:
            finder.embed(ref, self.options.offline)
        except ModelError as error:
            if self.options.embedder is not None:
                raise
            self._warn(f"no vectors: {error.message}", error.hint)

    @cached_property
    def found(self) -> Survey:
        """What there is to do. Paths are looked at first: a model may have to be downloaded for the rest."""
        options, own = self.options, self.options.log
        walked = find_files(
            options.paths, options.include, options.exclude, self._remembers, [own] if own is not None else []
        )
        found = survey(walked, self.options, self.store, self.identity.settings_digest())
        if not found and not (self.options.sync and self.store is not None):
            raise _nothing(walked, found)
        self.report.documents.unchanged = sum(len(entry.documents) for entry in found.unchanged)
        self._tell(walked, found)
        return found

    def _remembers(self, path: Path) -> bool:
        """Whether a path may be missing: the store has documents of it, which can be forgotten, or with `--sync`
        other paths are there to go on with.

        Raises
        ------
        UsageError : it has, and nobody said that they are to be forgotten.
        """
        roots = set(places(path))
        count = sum(len(entry.documents) for entry in self.store.files() if is_below(entry, roots)) if self.store else 0
        if count and not self.options.sync:
            raise UsageError(
                f"{path} is not there any more; the store holds {count} document(s) of it",
                f"--sync forgets them, and so does `kvtool store forget {shlex.quote(str(path))}`",
            )
        return count > 0 or (self.options.sync and any(other.exists() for other in self.options.paths))

    def _tell(self, walked: Walked, found: Survey) -> None:
        """Whatever was not read, by name; folders that are bare and paths that are gone."""
        named = {str(place) for path in self.options.paths for place in places(path)}
        for skipped in found.skipped:
            self.report.skipped[skipped.kind.value] += 1
            self.report.skipped_files.append(skipped)
            if skipped.path in named:  # in a folder there may be thousands; this one was asked for
                self._warn(f"skipped {skipped.path}: {skipped.reason}")
            else:
                self.events.skipped(skipped.path, skipped.reason)
        for failure in found.failures:
            self._fail(failure.path, failure.error)
        for path in walked.missing:
            would = "would be" if self.options.dry_run else "is"
            self._warn(f"{path} is not there any more: what the store holds of it {would} forgotten")
        for path in walked.bare:
            self._warn(f"{path}: no readable file in this folder")

    def _warn(self, text: str, hint: str = "") -> None:
        self.report.warnings.append(text)
        self.events.warn(text, hint)

    def _prepare(self, found: Survey) -> list[PreparedFile]:
        """Changed files cut into chunks. Whatever one file does, it fails alone."""
        if not found.changed:
            return []
        identity, tokenizer = self.identity, self.tokenizer  # what is wrong with these is no file's fault
        prepared = []
        for file in found.changed:
            try:
                prepared.append(prepare(file, identity, tokenizer))
            except Exception as error:
                self._fail(str(file.found.path), reason_of(error))
            for note in file.notes:
                self._warn(f"{file.found.path}: {note}")
        return prepared

    def _fail(self, path: str, reason: str) -> None:
        """Count a file that failed, and go on with the others.

        Raises
        ------
        KvtoolError : the first failure is to end the run.
        """
        if not self.options.continue_on_error:
            raise KvtoolError(f"{path}: {reason}", "without --fail-fast the other files are ingested all the same")
        self.report.documents.failed += 1
        self.report.failures.append({"path": path, "error": reason})
        self.events.failed(path, reason)

    def _missing(self, prepared: Iterable[PreparedFile]) -> dict[bytes, WantedChunk]:
        wanted = {chunk.chunk_id: chunk for file in prepared for chunk in file.chunks}
        if self.store is None:
            return wanted
        return {key: chunk for key, chunk in wanted.items() if not self.store.has_chunk(key)}

    def _count_plan(self, prepared: Iterable[PreparedFile], missing: dict[bytes, WantedChunk]) -> None:
        wanted = {chunk.chunk_id for file in prepared for chunk in file.chunks}
        self.report.chunks.reused = len(wanted) - len(missing)

    def _decoder_for(self, missing: dict[bytes, WantedChunk]) -> Decoder | None:
        """The model, if there is anything to compute.

        Raises
        ------
        UsageError : it cannot hold the lead-in and the longest chunk.
        """
        if not missing and not self._needs_prefix:
            return None
        decoder = self._load()
        longest = max((len(chunk.before) + len(chunk.ids) for chunk in missing.values()), default=0)
        decoder.check_length(
            len(self.identity.lead_in.ids) + longest, "use a shorter --lead-in or fewer --chunk-tokens"
        )
        return decoder

    @property
    def _needs_prefix(self) -> bool:
        assert self.store is not None
        return bool(self.identity.prefix) and not self.store.has_chunk(self.identity.prefix_id)

    def _store(
        self, prepared: list[PreparedFile], missing: dict[bytes, WantedChunk], decoder: Decoder | None, writer: Writer
    ) -> None:
        from kvtool.core.ingest.commit import commit_known

        if decoder is None:
            commit_known(prepared, writer, self.report)
            return
        from kvtool.core.ingest.compute import ChunkStorer

        self.events.step("prefill", sum(len(chunk.ids) for chunk in missing.values()), "tokens")
        assert self.store is not None
        profile = ProfileShelf(self.store).current() if level_of(self.options.level).nested else None
        lead_ins = open_lead_ins(self.store, decoder, self.identity)
        storer = ChunkStorer(
            decoder, self.identity, writer, self.options.level, self.report, self.events, lead_ins, profile
        )
        try:
            if self._needs_prefix:
                storer.store_prefix()
            storer.store(prepared, missing)
        finally:
            storer.close()

    def _load(self) -> Decoder:
        from kvtool.core.model.decoder import Decoder
        from kvtool.core.model.load import load_model

        self.events.status(f"loading {self.files.ref}")
        loaded = load_model(self.files, device=self.options.device, dtype=self.identity.dtype)
        self.report.resolved = {
            "model": loaded.files.ref,
            "device": loaded.device,
            "dtype": loaded.dtype,
            "fingerprint": loaded.fingerprint,
            "lead_in": self.identity.lead_in.mode,
        }
        self.events.status(f"{loaded.files.ref} on {loaded.device} in {loaded.dtype}")
        return Decoder(loaded)

    def _gate(self, decoder: Decoder, missing: dict[bytes, WantedChunk]) -> None:
        from kvtool.core.session.verdicts import gate_store

        assert self.store is not None
        verdict = gate_store(self.store, decoder, self.identity, [chunk.ids for chunk in missing.values()])
        if verdict is not None:
            self.report.gate = verdict.to_json()
            if not verdict.passed:
                self.events.warn("the gate failed: fused answers of this model will be refused", "kvtool inspect gate")

    def _say_lead_in_change(self, prepared: Iterable[PreparedFile], gone: Iterable[FileEntry]) -> None:
        """What is read now is made anew behind it; every other chunk stays as it is, and is found as before."""
        if self.store is None or self.known is None or self.known.lead_in == self.identity.lead_in:
            return
        kept, anew = self._others({file.entry.path for file in prepared}, {entry.path for entry in gone})
        text = f"the lead-in changes from {self.known.lead_in.mode!r} to {self.identity.lead_in.mode!r}: "
        text += f"{anew} chunks are made anew"
        text += f"; {kept} chunks of other documents stay behind theirs, and are found as before" if kept else ""
        self.report.warnings.append(text)
        self.events.warn(text, "ingest the other documents again to have them behind the new one, too" if kept else "")

    def _others(self, read: set[str], gone: set[str]) -> tuple[int, int]:
        """How many stored chunks only documents of files have that are neither read nor forgotten now; and how many
        documents of files that are read have."""
        assert self.store is not None
        chunks: dict[bool, set[bytes]] = {False: set(), True: set()}
        for entry in self.store.files():
            for source in entry.documents if entry.path not in gone else ():
                with suppress(DamagedError):  # what it has is unknown; nothing but this count hangs on it
                    document = self.store.document(source)
                    chunks[entry.path in read] |= {ref.chunk_id for ref in document.chunks} if document else set()
        return len(chunks[False] - chunks[True]), len(chunks[True])


def _nothing(walked: Walked, found: Survey) -> UsageError:
    """What is said where nothing could be taken at all."""
    reasons = [f"{failure.path}: {failure.error}" for failure in found.failures]
    reasons += [f"{skipped.path}: {skipped.reason}" for skipped in found.skipped]
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    reasons += [f"{path}: no readable file in this folder" for path in walked.bare]
    return UsageError(
        f"nothing to ingest: {reasons[0]}{more}",
        "name a folder with text, Markdown, HTML, code or JSON-lines files, or name the files themselves",
    )
