"""Chunks of a model that keeps states, computed alone: what ingest does of them where a lead-in is asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvtool.core.cache.writer import Writer
from kvtool.core.errors import DamagedError
from kvtool.core.ingest.account import Account
from kvtool.core.records.wanted import WantedChunk
from kvtool.core.session.alone import alone_id, keep_beginning, put
from kvtool.core.session.session import Session


@dataclass(frozen=True)
class AloneStorer:
    """Computes and stores what is kept of chunks."""

    session: Session

    def check_length(self, chunks: Sequence[WantedChunk]) -> None:
        """Refuse chunks of which the model cannot hold one behind the lead-in. Raises UsageError."""
        self.session.alone.check_length(max((len(chunk.ids) for chunk in chunks), default=0))

    def take(self, writer: Writer, account: Account, chunks: Sequence[WantedChunk]) -> None:
        """Store chunks, and before the first of a store the prompt's own beginning; durable on return.

        Raises
        ------
        NoSpaceError : there is no room.
        """
        report = account.report
        maker, store, turns = self.session.alone, self.session.store, self.session.decoder.turns
        with turns.turn():  # of a served model, between two steps of the answers
            report.kv_bytes += keep_beginning(maker, store, writer)
        for chunk in chunks:
            with suppress(DamagedError):
                if store.stretch(alone_id(self.session.identity, chunk.ids)) is not None:
                    continue  # it is of a run that was interrupted
            with turns.turn():
                started = time.perf_counter()
                made = maker.chunk(chunk.ids)
            report.prefill_seconds += time.perf_counter() - started
            put(writer, made, maker.decoder.kv_dtype)
            report.kv_bytes += made.info.size
            report.tokens += len(chunk.ids)
            report.chunks.computed += 1
            account.computed([chunk])
