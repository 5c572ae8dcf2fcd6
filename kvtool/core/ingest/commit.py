"""Documents whose chunks are all stored already: renamed, moved or reverted files need no model."""

from __future__ import annotations

from collections.abc import Iterable

from kvtool.core.cache.writer import Writer
from kvtool.core.ingest.ingest_report import IngestReport
from kvtool.core.ingest.prepare import PreparedFile


def commit_known(files: Iterable[PreparedFile], writer: Writer, report: IngestReport) -> None:
    """Commit files, one transaction each."""
    for file in files:
        writer.commit_file(file.entry, file.documents)
        count_file(file, report)


def count_file(file: PreparedFile, report: IngestReport) -> None:
    """Count a committed file's documents as added or changed."""
    if file.is_new:
        report.documents.added += len(file.documents)
    else:
        report.documents.changed += len(file.documents)
