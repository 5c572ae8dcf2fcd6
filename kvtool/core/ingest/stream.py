"""Stream of the files of an ingest; changed files are split into chunks, of which the new ones are computed."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

from kvtool.core.cache.entries import ChunkSpec, FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.corpus.options import Shard
from kvtool.core.corpus.reading import Reading
from kvtool.core.corpus.walk import Failure, Skipped, Walked, find_files, places
from kvtool.core.errors import UsageError
from kvtool.core.ingest.account import Account
from kvtool.core.ingest.choices import Choices
from kvtool.core.ingest.options import IngestOptions
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

    @cached_property
    def abandoned(self) -> list[str]:
        return [path for path in self._synced.unfinished() if self._is_gone(path)] if self._synced else []

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

    def leave_known_out(self) -> None:
        for file in self.walked.files:
            if self._survey.is_known(file):
                self._account.leave_out(file.name)

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


class NewChunks:
    """Chunks that neither the store nor an earlier file of this run has; `reused` counts those that the store has."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self.seen: set[bytes] = set()
        self.reused = 0

    def of(self, file: PreparedFile) -> list[ChunkSpec]:
        first = {chunk.chunk_id: chunk for chunk in file.chunks if chunk.chunk_id not in self.seen}
        self.seen.update(first)
        new = [chunk for key, chunk in first.items() if self._store is None or not self._store.serves_own(key)]
        self.reused += len(first) - len(new)
        return new

    def orphaned(self, paths: Collection[str], keep: bytes) -> int:
        """Count the stored chunks that nothing but `keep` refers to once these files are gone. Raises DamagedError."""
        if self._store is None:
            return 0
        going = {source for entry in self._store.files() if entry.path in paths for source in entry.documents}
        staying = (document for document in self._store.documents() if document.source not in going)
        wanted = {ref.chunk_id for document in staying for ref in document.chunks} | self.seen | {keep}
        wanted |= {chunk for path, ids in self._store.unfinished().items() if path not in paths for chunk in ids}
        return sum(chunk_id not in wanted for chunk_id in self._store.chunk_ids())

    def take_back(self, new: Iterable[ChunkSpec]) -> None:
        """Forget new chunks that are not computed after all: in a later file they are new again."""
        self.seen.difference_update(chunk.chunk_id for chunk in new)
