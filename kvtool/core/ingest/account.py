"""Counts of an ingest, and their progress events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvtool.core.cache.entries import ChunkSpec, FileEntry
from kvtool.core.cache.store import Store
from kvtool.core.common.types import Events
from kvtool.core.corpus.readers.document import EXTRA
from kvtool.core.corpus.walk import Failure, FoundFile, Skip, Skipped, places
from kvtool.core.errors import KvtoolError
from kvtool.core.ingest.estimate import Estimate, remember_speed
from kvtool.core.ingest.ingest_report import PHASES, IngestReport
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.prepare import PreparedFile


class Account:
    """Keeps the report of a run as it grows, and tells the events that go with it."""

    def __init__(self, options: IngestOptions, events: Events) -> None:
        self.report = IngestReport(dry_run=options.dry_run)
        self.events = events
        self._fail_fast, self._strict = not options.continue_on_error, options.strict
        self.wanted = 0  # tokens that have to be computed, of the files that are read
        self._estimate = Estimate(())
        self._computes = False  # whether progress is counted in tokens
        self._computed = 0  # tokens
        self._began = self._computed_at = 0.0  # seconds of the first and the last of them
        self._options = options
        self._named = {str(place) for path in options.paths for place in places(path)}

    @contextmanager
    def phase(self, name: str, told: bool = True) -> Iterator[None]:
        """Tell that a phase of the run begins (`ingest_report.PHASES`), and count the time inside of this towards it;
        that of a phase in it to that one alone. `told`: what is inside does not tell it better."""
        if told:
            self.events.status(PHASES[name])
        phases = self.report.phases
        started, others = time.perf_counter(), sum(phases.values())
        try:
            yield
        finally:
            within = sum(phases.values()) - others
            phases[name] = phases.get(name, 0.0) + time.perf_counter() - started - within

    def warn(self, text: str, hint: str = "") -> None:
        """Tell of something that the user should know."""
        self.report.warnings.append(text)
        self.events.warn(text, hint)

    def skip(self, skipped: Skipped) -> None:
        """Count a file that is passed over; one that was asked for by name is worth a warning."""
        self.report.skipped[skipped.kind.value] += 1
        if skipped.kind is Skip.UNSUPPORTED:
            self.report.unsupported[skipped.what] = self.report.unsupported.get(skipped.what, 0) + 1
        if skipped.kind is Skip.UNINSTALLED and self.report.skipped[skipped.kind.value] == 1:
            self.warn(f"{skipped.path} and its like are skipped: {skipped.reason.partition(' (')[0]}", EXTRA)
        elif skipped.path in self._named:
            self.warn(f"skipped {skipped.path}: {skipped.reason}")
        else:
            self.events.skipped(skipped.path, skipped.reason)

    def fail(self, failure: Failure) -> None:
        """Count a file that failed, and go on with the others; one that failed so before is only noted.

        Raises
        ------
        KvtoolError : the first failure is to end the run.
        """
        row = {"path": failure.path, "error": failure.error}
        self.report.not_read_again += not failure.read
        if failure.known and not self._strict:
            self.report.still_failing.append(row)
            self.events.skipped(failure.path, f"{failure.error}, as before")
            return
        if self._fail_fast:
            raise KvtoolError(
                f"{failure.path}: {failure.error}", "without --fail-fast the other files are ingested all the same"
            )
        self.report.documents.failed += 1
        self.report.failures.append(row)
        self.events.failed(failure.path, failure.error)

    def begin(self, files: Sequence[FoundFile]) -> None:
        """Begin to look at files."""
        self._estimate = Estimate(files)
        if not self.report.dry_run:
            self.events.step("reading files", len(files), "files")

    def look_at(self, path: str) -> None:
        """Count a file as looked at."""
        known = self._estimate.pass_by(path)
        if self._computes:
            self.events.expect(self.expected)
        elif known:
            self.events.advance(1)

    def want(self, file: PreparedFile, new: Sequence[ChunkSpec]) -> None:
        """Count the chunks of a file that have to be computed."""
        tokens = sum(len(chunk.ids) for chunk in new)
        self._estimate.learn(file.entry.path, file.entry.size, tokens)
        self.wanted += tokens
        if self._computes:
            self.events.expect(self.expected)

    @property
    def expected(self) -> int:
        """Return the number of tokens to compute; for files that are not read yet, an estimate."""
        return self.wanted + self._estimate.tokens

    def begin_computing(self) -> None:
        """Begin to count tokens: what there is to do is known in them now."""
        if not self._computes and not self.report.dry_run:
            self._computes, self._began = True, time.monotonic()
            self.events.step("computing KV", max(1, self.expected), "tokens")

    def computed(self, chunks: Sequence[ChunkSpec]) -> None:
        """Tell that chunks are computed."""
        tokens = sum(len(chunk.ids) for chunk in chunks)
        self._computed += tokens
        self._computed_at = time.monotonic()
        self.events.advance(tokens)

    def remember_speed(self, store: Store, fingerprint: str) -> None:
        """Keep the speed of this run, writes included, for the next one's forecast."""
        remember_speed(store, fingerprint, self._options, self._computed, self._computed_at - self._began)

    def unchanged(self, entry: FileEntry) -> None:
        """Count a file that the store has just so."""
        self.report.documents.unchanged += len(entry.documents)

    def count_file(self, file: PreparedFile) -> None:
        """Count a file's documents as added or changed."""
        if file.is_new:
            self.report.documents.added += len(file.documents)
        else:
            self.report.documents.changed += len(file.documents)
        self.events.took(file.entry.path, "added" if file.is_new else "changed", len(file.chunks))

    def removed(self, entry: FileEntry) -> None:
        """Count a file whose documents are forgotten."""
        self.report.documents.removed += len(entry.documents)
        self.events.took(entry.path, "removed", 0)
