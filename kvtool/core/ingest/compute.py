"""Batches of chunks computed and written in this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.identity import HERE
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import level_of
from kvtool.core.codec.profile import Profile
from kvtool.core.ingest.account import Account
from kvtool.core.ingest.prepare import PreparedFile
from kvtool.core.ingest.storer import Batch, Storer
from kvtool.core.model.decoder import Decoder
from kvtool.core.records.encode import LeadIns, PrefilledChunk, encode, encoder_threads, prefill

QUEUED = 4  # batches and commits that may wait to be written: bounds the memory they hold


@dataclass(frozen=True, slots=True)
class Maker:
    """Holds what records are made with."""

    decoder: Decoder
    lead_ins: LeadIns
    level: str
    profile: Profile | None = None


class ChunkStorer(Storer):
    """Computes batches with a model at hand.

    Beside a GPU's compute one thread writes. On the CPU writes take turns with the compute: a thread that holds one of
    the cores lets all others wait for their share of every matrix product, four times its own work (measured, 2 cores).
    """

    def __init__(self, writer: Writer, account: Account, maker: Maker) -> None:
        decoder = maker.decoder
        super().__init__(account, decoder.device, decoder.context, len(maker.lead_ins.own))
        self._writer, self.maker = writer, maker
        self._pool = None if decoder.device == "cpu" else ThreadPoolExecutor(1, "kvtool-writer")
        self._encoders = encoder_threads()
        self._pending: deque[Future[None]] = deque()

    def store_prefix(self, prefix: ChunkSpec) -> None:
        """See Storer."""
        decoder = self.maker.decoder
        with decoder.turns.turn():
            made = prefill(decoder, LeadIns.nothing(decoder), [prefix])
        self._write(made, level_of(self.maker.level).of_prefix)
        self._settle(0)

    def finish(self) -> None:
        """See Storer."""
        super().finish()
        self._settle(0)

    def close(self) -> None:
        """Wait for the threads that write and encode."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._encoders.shutdown(wait=True)

    def _compute(self, batch: Batch) -> None:
        self._write(self._prefill(batch.chunks), self.maker.level, self._spanning(batch))
        self._is_there(batch)

    def _prefill(self, batch: Sequence[ChunkSpec]) -> list[PrefilledChunk]:
        started, report = time.perf_counter(), self._account.report
        with self.maker.decoder.turns.turn():  # of a served model, between two steps of the answers
            made = prefill(self.maker.decoder, self.maker.lead_ins, batch)
        report.prefill_seconds += time.perf_counter() - started
        report.tokens += sum(len(chunk.ids) for chunk in batch)
        report.chunks.computed += len(batch)
        return made

    def _write(self, batch: Sequence[PrefilledChunk], level: str, unfinished: Sequence[PreparedFile] = ()) -> None:
        # Verbatim records are copies: one at a time is as fast, and takes less memory.
        several = map if level_of(level).verbatim else self._encoders.map

        def work() -> None:
            for file in unfinished:
                self._writer.begin_file(file.entry.path, file.chunk_ids)
            for records in several(partial(encode, level=level, profile=self.maker.profile), batch):
                self._account.report.kv_bytes += sum(map(len, records.layers))
                self._writer.put_chunk(records.chunk_id, records.info, level, records.layers, origin=HERE)

        self._submit(work)

    def _commit(self, file: PreparedFile) -> None:
        self._submit(partial(self._writer.commit_file, file.entry, file.documents))

    def _submit(self, work: Callable[[], None]) -> None:
        if self._pool is None:
            work()
            return
        self._settle(QUEUED - 1)
        self._pending.append(self._pool.submit(work))

    def _settle(self, left: int) -> None:
        """Wait until at most `left` pieces of work wait to be written. After a failure nothing more is written."""
        while len(self._pending) > left or (self._pending and self._pending[0].done()):
            try:
                self._pending.popleft().result()
            except BaseException:
                for future in self._pending:
                    future.cancel()
                self._pending.clear()
                raise
