"""What an ingest counts, and tells whoever watches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvtool.core.cache.entries import FileEntry
from kvtool.core.common.progress import Events
from kvtool.core.corpus.readers.document import EXTRA
from kvtool.core.corpus.walk import Failure, Skip, Skipped, places
from kvtool.core.errors import KvtoolError
from kvtool.core.ingest.ingest_report import IngestReport
from kvtool.core.ingest.options import IngestOptions
from kvtool.core.ingest.prepare import PreparedFile
from kvtool.core.model.files import DOWNLOAD, UNPACK

_ONCE = {
    DOWNLOAD: "downloading the model, once",
    UNPACK: "unpacking the model from its GGUF file, once",
}


class Account:
    """Keeps the report of a run as it grows, and tells the events that go with it."""

    def __init__(self, options: IngestOptions, events: Events) -> None:
        self.report = IngestReport(dry_run=options.dry_run)
        self.events = events
        self._fail_fast, self._strict = not options.continue_on_error, options.strict
        self._named = {str(place) for path in options.paths for place in places(path)}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside of this towards a phase of the run (`IngestReport.phases`), that of a phase in it to
        that one alone."""
        phases = self.report.phases
        started, others = time.perf_counter(), sum(phases.values())
        try:
            yield
        finally:
            within = sum(phases.values()) - others
            phases[name] = phases.get(name, 0.0) + time.perf_counter() - started - within

    @contextmanager
    def once(self, name: str) -> Iterator[None]:
        """Count what is done the first time that a model is used (`model/files.py`), and tell it: it may take long."""
        self.events.status(_ONCE[name])
        with self.phase(name):
            yield

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

    def begin(self, size: int) -> None:
        """Begin to look at files of so many bytes."""
        self.events.step("ingest", max(1, -(-size // 1000)), "kB")

    def advance(self, size: float) -> None:
        """Tell that so many bytes of the files are done."""
        self.events.advance(size / 1000)

    def unchanged(self, entry: FileEntry) -> None:
        """Count a file that the store has just so."""
        self.report.documents.unchanged += len(entry.documents)
        self.advance(entry.size)

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
