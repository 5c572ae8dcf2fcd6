"""A stream of prepared files: what they lack is prefilled in batches, and each is committed as soon as it is whole."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import level_of
from kvtool.core.codec.profile import Profile
from kvtool.core.ingest.account import Account
from kvtool.core.ingest.prepare import PreparedFile
from kvtool.core.model.decoder import Decoder
from kvtool.core.records.making import LeadIns, PrefilledChunk, encode, prefill
from kvtool.core.records.threads import working
from kvtool.core.records.wanted import WantedChunk

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
QUEUED = 4  # batches and commits that may wait to be written: bounds the memory they hold


def batch_tokens(device: str) -> int:
    """Tell how many tokens are prefilled at once."""
    return BATCH_TOKENS.get(device.split(":")[0], BATCH_TOKENS["cpu"])


@dataclass(frozen=True, slots=True)
class Maker:
    """Holds what records are made with."""

    decoder: Decoder
    lead_ins: LeadIns
    level: str
    profile: Profile | None = None

    def check_length(self, chunks: Sequence[WantedChunk]) -> None:
        """Refuse chunks of which the model cannot hold the longest behind the lead-in. Raises UsageError."""
        check_length(self.decoder, len(self.lead_ins.own), chunks)


def check_length(decoder: Decoder, lead_in: int, chunks: Sequence[WantedChunk]) -> None:
    """Refuse chunks of which the model cannot hold one behind a lead-in of so many tokens. Raises UsageError."""
    longest = max((len(chunk.before) + len(chunk.ids) for chunk in chunks), default=0)
    decoder.check_length(lead_in + longest, "use a shorter --lead-in or fewer --chunk-tokens")


@dataclass(slots=True)
class _Waiting:
    """Counts how many chunks a file still waits for; `number` is its place in the order of files."""

    number: int
    file: PreparedFile
    chunks: int


class ChunkStorer:
    """Takes files one by one; holds those whose chunks wait for a batch to be full.

    Beside a GPU's compute one thread writes. On the CPU writes take turns with the compute: a thread that holds one of
    the cores lets all others wait for their share of every matrix product, four times its own work (measured, 2 cores).
    """

    def __init__(self, writer: Writer, account: Account, maker: Maker) -> None:
        self._writer, self._account, self.maker = writer, account, maker
        self._batch: list[WantedChunk] = []
        self._batch_tokens = 0
        self._batch_bytes = 0.0  # of the files that the batch is cut from
        self._most_tokens = batch_tokens(maker.decoder.device)
        self._waiting: dict[bytes, list[_Waiting]] = {}
        self._taken = 0
        self._pool = None if maker.decoder.device == "cpu" else ThreadPoolExecutor(1, "kvtool-writer")
        self._encoders = working()
        self._pending: deque[Future[None]] = deque()

    def store_prefix(self, prefix: WantedChunk) -> None:
        """Compute and keep the prompt's own beginning, which is exact in every prompt."""
        decoder = self.maker.decoder
        with decoder.turns.turn():
            made = prefill(decoder, LeadIns.nothing(decoder), [prefix])
        self._write(made, level_of(self.maker.level).of_prefix)
        self._settle(0)

    def take(self, file: PreparedFile, missing: Sequence[WantedChunk]) -> None:
        """Take in a file with those of its chunks that are new; they are computed as soon as they fill a batch."""
        self._taken += 1
        self._waiting.update((chunk.chunk_id, []) for chunk in missing)
        lists = [self._waiting[key] for key in {chunk.chunk_id for chunk in file.chunks} & self._waiting.keys()]
        waiting = _Waiting(self._taken, file, len(lists))
        for files in lists:
            files.append(waiting)
        if not lists:
            self._commit([waiting])
        share = file.entry.size / max(1, sum(len(chunk.ids) for chunk in missing))
        for chunk in missing:
            self._queue(chunk, share * len(chunk.ids))
        if not missing:
            self._account.advance(file.entry.size)

    def finish(self) -> None:
        """Compute what is left of a batch and wait until all is written; raise what went wrong there."""
        self._compute()
        self._settle(0)

    def close(self) -> None:
        """Wait for the threads that write and encode."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._encoders.shutdown(wait=True)

    def _queue(self, chunk: WantedChunk, size: float) -> None:
        """Put a chunk into the batch, which holds at most so many tokens, or one longer chunk."""
        length = len(chunk.before) + len(chunk.ids)
        if self._batch_tokens + length > self._most_tokens:
            self._compute()
        self._batch.append(chunk)
        self._batch_tokens += length
        self._batch_bytes += size

    def _compute(self) -> None:
        if not self._batch:
            return
        batch, size = self._batch, self._batch_bytes
        self._batch, self._batch_tokens, self._batch_bytes = [], 0, 0.0
        self._write(self._prefill(batch), self.maker.level)
        self._account.advance(size)
        whole = []
        for waiting in (waiting for chunk in batch for waiting in self._waiting.pop(chunk.chunk_id)):
            waiting.chunks -= 1
            if not waiting.chunks:
                whole.append(waiting)
        self._commit(sorted(whole, key=lambda waiting: waiting.number))

    def _prefill(self, batch: Sequence[WantedChunk]) -> list[PrefilledChunk]:
        started, report = time.perf_counter(), self._account.report
        with self.maker.decoder.turns.turn():  # of a served model, between two steps of the answers
            made = prefill(self.maker.decoder, self.maker.lead_ins, batch)
        report.prefill_seconds += time.perf_counter() - started
        report.tokens += sum(len(chunk.ids) for chunk in batch)
        report.chunks.computed += len(batch)
        return made

    def _write(self, batch: Sequence[PrefilledChunk], level: str) -> None:
        # Verbatim records are copies: one at a time is as fast, and takes less memory.
        several = map if level_of(level).verbatim else self._encoders.map

        def work() -> None:
            for records in several(partial(encode, level=level, profile=self.maker.profile), batch):
                self._account.report.kv_bytes += sum(map(len, records.layers))
                self._writer.put_chunk(records.chunk_id, records.info, level, records.layers)

        self._submit(work)

    def _commit(self, whole: Sequence[_Waiting]) -> None:
        for file in (waiting.file for waiting in whole):
            self._submit(partial(self._writer.commit_file, file.entry, file.documents))
            self._account.count_file(file)

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
