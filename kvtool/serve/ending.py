"""Shutdown of an ingest when its server ends: stored files stay stored, and the next ingest continues from there."""

from __future__ import annotations

from kvtool.core.common.types import Events
from kvtool.serve.job import EndedError


class Ending:
    """Ends ingests where they tell how far they are, as Ctrl-C does: there all that was committed stands.

    Attributes
    ----------
    behind_a_document : they end as soon as they have kept, passed over or failed at a file.
    at_once : they end behind their next batch of chunks, too.
    """

    def __init__(self) -> None:
        self.behind_a_document = self.at_once = False

    def events(self) -> Events:
        """Return the callbacks for one ingest."""
        kept = 0

        def stop() -> None:
            went = f"{kept} {'file was' if kept == 1 else 'files were'} kept"
            raise EndedError(f"the server ends: the ingest has stopped, {went}", "send it again: it goes on from there")

        def took(path: str, what: str, chunks: int) -> None:
            nonlocal kept
            kept += what != "removed"
            if self.behind_a_document or self.at_once:
                stop()

        def left(path: str, why: str) -> None:
            if self.behind_a_document or self.at_once:
                stop()

        def advance(count: float) -> None:
            if self.at_once:
                stop()

        return Events(advance=advance, failed=left, skipped=left, took=took)
