"""Identity of the store that an ingest writes, and the stream of files that go into it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from kvtool.core.cache.entries import ChunkInfo, ChunkSpec, FileEntry
from kvtool.core.cache.identity import HERE
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.checkpoint.files import ModelFiles, Once, unnoticed
from kvtool.core.checkpoint.hub import model_fingerprint
from kvtool.core.corpus.options import Shard
from kvtool.core.corpus.reading import Reading
from kvtool.core.corpus.split import SplitSettings
from kvtool.core.corpus.walk import Failure, Skipped, Walked, find_files, places
from kvtool.core.errors import UsageError
from kvtool.core.ingest.options import IngestOptions, is_lead_in_file
from kvtool.core.ingest.report import Account
from kvtool.core.ingest.survey import (
    ChangedFile,
    Outcome,
    PreparedFile,
    Seen,
    Survey,
    exists,
    is_below,
    prepare,
    reason_of,
    vanished,
)
from kvtool.core.model.options import DEFAULT_MODEL, DEFAULT_SYSTEM
from kvtool.core.session.identity import LeadInIds, StoreIdentity, check_same_model, is_same_model, resolve_named

_NO_LEAD_IN = "none"
_TEXT_SIZE, _TEXT_SECONDS = 2**23, 1.0  # characters and age of texts that wait for a commit


class Choices:
    """Choice of the model, the prompt's fixed parts, the lead-in and the split.

    `once` is entered while a model is downloaded or unpacked. `known` is the store's identity before this run.
    """

    def __init__(self, store: Store | None, options: IngestOptions, once: Once = unnoticed) -> None:
        self._options, self._once = options, once
        self.known = StoreIdentity.from_manifest(store.manifest()) if store is not None else None
        self.made_by = store.made_by() if store is not None else HERE
        self._store = store
        self.replaced: StoreIdentity | None = None  # the store's identity of another model, which this run replaces

    @cached_property
    def files(self) -> ModelFiles:
        stored = self.known.model if self.known else DEFAULT_MODEL
        return resolve_named(self._options.model, stored, self.made_by, self._options.offline, self._once)

    @cached_property
    def tokenizer(self) -> Any:
        from kvtool.core.checkpoint.load import load_tokenizer

        return load_tokenizer(self.files)

    @cached_property
    def identity(self) -> StoreIdentity:
        """The store's identity with the changes of the options, or a new one. Raises ModelError or UsageError."""
        if self.known is not None and self.made_by.is_foreign:
            return self._agreed(self.known)
        split = self._options.splitting or (self.known.split if self.known else SplitSettings())
        if self.known is not None and self._may_replace(self.known):
            self.known, self.replaced = None, self.known
        if self.known is None:
            return self._new_identity(split)
        check_same_model(self.files, self.known)
        if self._options.store_dtype not in (None, kept := self.known.dtype):
            what = f"the store keeps {kept}, not {self._options.store_dtype}"
            raise UsageError(what, "leave --store-dtype out, or use another --store")
        asked = self._options.lead_in
        reads_file = asked is not None and is_lead_in_file(asked)  # whose text may have changed
        if self._lead_in() == (self.known.lead_in.mode, self.known.system) and not reads_file:
            return replace(self.known, split=split)
        return self._new_identity(split)

    def _may_replace(self, known: StoreIdentity) -> bool:
        """Return True if another model is named, and nothing was computed by the store's own but the beginning."""
        store = self._store
        if self._options.model is None or store is None or is_same_model(self.files, known):
            return False
        return {*store.ids_here()} <= {known.prefix_id} and not store.stretches()

    def _agreed(self, known: StoreIdentity) -> StoreIdentity:
        """Return the identity of a new store, if a foreign store has the same.

        A foreign instruction would precede the user's own documents in every prompt, and a foreign lead-in every
        chunk; and token ids need not be those of the text that is shown.
        """
        check_same_model(self.files, known)
        wanted = Choices(None, replace(self._options, model=self.files.ref), self._once).identity
        differs = [name.name for name in fields(wanted) if getattr(wanted, name.name) != getattr(known, name.name)]
        if differs := [name for name in differs if name != "model"]:
            raise UsageError(
                f"the store was made by {self.made_by.name}, with another {', '.join(differs)} than yours would be",
                "ingest into another --store, or name the same with --lead-in, --chunk-tokens, --split and --system",
            )
        return wanted

    def _lead_in(self) -> tuple[str, str]:
        known = self.known
        mode = self._options.lead_in or (known.lead_in.mode if known else "warm")
        if is_lead_in_file(mode):
            mode = str(Path(mode).expanduser().absolute())
        return mode, self._options.system or (known.system if known else DEFAULT_SYSTEM)

    def _new_identity(self, split: SplitSettings) -> StoreIdentity:
        from kvtool.core.checkpoint.load import kept_format, supported_config
        from kvtool.core.checkpoint.support import keeps_states
        from kvtool.core.model.prompt import PromptParts, lead_in_ids, prompt_parts

        # An unsupported model is refused before a store is made for it.
        keeps = self.known.keeps_states if self.known else keeps_states(supported_config(self.files))
        mode, system = self._lead_in()
        if keeps:
            mode = self._lead_in_of_states(mode)
        dtype = self.known.dtype if self.known else kept_format(self._options.store_dtype or "auto", self.files)
        if self.known and system == self.known.system:  # a template that states the date states another one today
            parts = PromptParts(self.known.prefix, self.known.answer_header)
        else:
            parts = prompt_parts(self.tokenizer, system)
        fingerprint, ids = model_fingerprint(self.files, dtype, self._once), lead_in_ids(mode, self.tokenizer, parts)
        return StoreIdentity(
            model=self.files.ref,
            fingerprint=fingerprint,
            dtype=dtype,
            prefix=parts.prefix,
            answer_header=parts.answer_header,
            lead_in=LeadInIds(mode, ids),
            split=split,
            system=system,
            keeps_states=keeps,
        )

    def _lead_in_of_states(self, mode: str) -> str:
        kept = self.known.lead_in.mode if self.known else _NO_LEAD_IN
        if self._options.lead_in is not None and mode != kept:
            raise UsageError(
                f"{self.files.ref} keeps a recurrent state, so no chunk is computed before a question: it takes no "
                f"lead-in {mode}",
                "leave --lead-in out",
            )
        return kept


def walk(options: IngestOptions, reading: Reading, remembers: Callable[[Path], bool]) -> Walked:
    leave_out = [options.log] if options.log is not None else []
    asked = (options.paths, options.include, options.exclude)
    walked = find_files(*asked, remembers, leave_out, reading, options.ignore, options.roots)
    return walked if options.shard is None else walked.part(Shard.read(options.shard))


class Stream:
    """Iterator of changed files, which it reads and splits on demand; a new store may be set before the first file."""

    def __init__(
        self, store: Store | None, options: IngestOptions, choices: Choices, account: Account, reading: Reading
    ) -> None:
        self._options, self._choices, self._account, self._reading = options, choices, account, reading
        self.seen = Seen(store)
        self._outcomes = self._surveyed()

    @property
    def store(self) -> Store | None:
        return self.seen.store

    @cached_property
    def walked(self) -> Walked:
        return walk(self._options, self._reading, self._remembers)

    def _remembers(self, path: Path) -> bool:
        """With `--sync`, a path may be missing if the store has documents of it or other paths exist."""
        roots, sync = set(places(path)), self._options.sync
        files = self.store.files() if self.store else ()
        count = sum(len(entry.documents) for entry in files if is_below(entry.path, roots))
        if count and not sync:
            raise UsageError(f"{path} is not there any more; the store holds {count} document(s) of it", _forgets(path))
        return count > 0 or (sync and any(other.exists() for other in self._options.paths))

    @cached_property
    def gone(self) -> list[FileEntry]:
        return [entry for entry in self._synced.files() if self._is_gone(entry.path)] if self._synced else []

    @property
    def _synced(self) -> Store | None:
        """The store, if documents of files that are gone are removed from it."""
        return self.store if self._options.sync else None

    @cached_property
    def _is_gone(self) -> Callable[[str], bool]:
        """Return True for a deleted file below the given paths."""
        roots = {place for path in self._options.paths if path not in self.kept for place in places(path)}
        present = {file.name for file in self.walked.files}
        return lambda path: path not in present and is_below(path, roots) and not exists(Path(path))

    @cached_property
    def kept(self) -> list[Path]:
        """Return the given folders whose documents `--sync` keeps, since they are empty or missing."""
        return vanished(self._options.paths, self._synced) if self._synced else []

    def begin(self) -> None:
        """Read up to the first file that can be ingested. Raises UsageError if nothing is to ingest or to remove."""
        first = next(self._outcomes, None)
        self._outcomes = chain([first] if first is not None else [], self._outcomes)

    def __iter__(self) -> Iterator[PreparedFile]:
        self._tell_paths()
        self._account.begin(self.walked.files)
        for outcome in self._outcomes:
            self._account.look_at(outcome.found.name if isinstance(outcome, ChangedFile) else outcome.path)
            if isinstance(outcome, Failure):
                self._account.fail(outcome)
            elif isinstance(outcome, Skipped):
                self._account.skip(outcome)
            elif isinstance(outcome, FileEntry):
                self._account.unchanged(outcome)
            elif (file := self._prepared(outcome)) is not None:
                yield file

    @cached_property
    def _survey(self) -> Survey:
        return Survey(self._choices.identity.settings_digest(), self._reading, self.seen)

    def _surveyed(self) -> Iterator[Outcome]:
        """Survey each file. Failures are held back until one file can be ingested."""
        walked = self.walked
        with self._account.phase("model_files"):
            survey = self._survey
        bad: list[Outcome] = [*walked.skipped, *map(self.seen.compared, walked.failures)]
        nothing = not self.gone
        for file in walked.files:
            outcome = survey.look(file)
            if nothing and isinstance(outcome, Failure | Skipped):
                bad.append(outcome)
                continue
            nothing = False
            yield from bad
            bad = []
            yield outcome
        if nothing and self.kept:
            raise UsageError(_is_kept(self.kept[0]), _forgets(self.kept[0]))
        if nothing and not self._may_be_nothing(bad):
            raise _nothing(walked, bad)
        yield from bad

    def _may_be_nothing(self, bad: Sequence[Outcome]) -> bool:
        """Return True if a run may have no file: files are deleted, or all are in other shards."""
        if self._options.sync and self.store is not None:
            return True
        return self._options.shard is not None and not bad and not self.walked.bare

    def _prepared(self, changed: ChangedFile) -> PreparedFile | None:
        identity, tokenizer = self._choices.identity, self._choices.tokenizer  # their errors are no file's fault
        path, file = changed.found.name, None
        try:
            file = prepare(changed, identity, tokenizer)
        except Exception as error:
            self.fail(path, reason_of(error))
        for note in changed.notes:
            self._account.warn(f"{path}: {note}")
        return file

    def fail(self, path: str, error: str) -> None:
        self.seen.take_back(path)
        self._account.fail(self.seen.compared(Failure(path, error)))

    def _tell_paths(self) -> None:
        would = "would be" if self._options.dry_run else "is"
        for path in self.kept:
            self._account.warn(_is_kept(path), _forgets(path))
        for path in set(self.walked.missing).difference(self.kept):
            self._account.warn(f"{path} is not there any more: what the store holds of it {would} forgotten")
        for path in set(self.walked.bare).difference(map(Path.resolve, self.kept)):
            self._account.warn(f"{path}: no readable file in this folder")


def _is_kept(path: Path) -> str:
    return f"nothing is at {path} any more, as if its disk were not mounted: what the store holds of it stays"


def _forgets(path: Path) -> str:
    return f"`kvtool store rm {shlex.quote(str(path))}` removes it"


def _nothing(walked: Walked, bad: Sequence[Outcome]) -> UsageError:
    reasons = [f"{failure.path}: {failure.error}" for failure in bad if isinstance(failure, Failure)]
    reasons += [f"{skipped.path}: {skipped.reason}" for skipped in bad if isinstance(skipped, Skipped)]
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    reasons += [f"{path}: no readable file in this folder" for path in walked.bare]
    return UsageError(
        f"nothing to ingest: {reasons[0]}{more}",
        "name a folder with documents, or name the files themselves; `kvtool help documents` lists what is read",
    )


class Texts:
    """Files whose texts wait to be committed, many at once: a disk waits at the end of each commit. `before` is called
    before the first one."""

    def __init__(self, writer: Writer, account: Account, before: Callable[[Writer], None]) -> None:
        self._writer, self._account, self._before = writer, account, before
        self._files: list[PreparedFile] = []
        self._infos: dict[bytes, ChunkInfo] = {}
        self._committed_at = time.monotonic()

    def add(self, file: PreparedFile, infos: Mapping[bytes, ChunkInfo]) -> None:
        self._files.append(file)
        self._infos.update(infos)
        size = sum(len(document.text) for each in self._files for document in each.documents)
        if size >= _TEXT_SIZE or time.monotonic() - self._committed_at >= _TEXT_SECONDS:
            self.commit()

    def commit(self) -> None:
        files, infos, self._files, self._infos = self._files, self._infos, [], {}
        if files:
            self._before(self._writer)
            self._writer.commit_files([(file.entry, file.documents) for file in files], infos)
        self._committed_at = time.monotonic()
        for file in files:
            self._account.count_file(file)


class NewChunks:
    """Chunks of changed files that neither the store nor an earlier file of this run describes; `reused` counts those
    whose KV the store has."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._seen: set[bytes] = set()
        self.reused = 0

    @cached_property
    def _known(self) -> set[bytes]:
        return {*self._store.chunk_ids()} if self._store is not None else set()

    def of(self, file: PreparedFile) -> list[ChunkSpec]:
        first = {chunk.chunk_id: chunk for chunk in file.chunks if chunk.chunk_id not in self._seen}
        self._seen.update(first)
        if (store := self._store) is None:
            return [*first.values()]
        known = self._known.intersection(first)
        self.reused += sum(map(store.serves_own, known))
        own = {*filter(store.describes_own, known)}
        return [chunk for key, chunk in first.items() if key not in own]

    def orphaned(self, paths: Collection[str], keep: bytes) -> int:
        """Count the stored chunks that nothing but `keep` refers to once these files are gone. Raises DamagedError."""
        if self._store is None:
            return 0
        going = {source for entry in self._store.files() if entry.path in paths for source in entry.documents}
        staying = (document for document in self._store.documents() if document.source not in going)
        wanted = {ref.chunk_id for document in staying for ref in document.chunks} | self._seen | {keep}
        return sum(chunk_id not in wanted for chunk_id in self._store.chunk_ids())
