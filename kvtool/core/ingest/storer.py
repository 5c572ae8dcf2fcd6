"""Batches of new chunks, computed and written; a file is committed as soon as it is complete."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from kvtool.core.cache.entries import ChunkSpec
from kvtool.core.cache.identity import HERE
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.levels import level_of
from kvtool.core.codec.profile import Profile
from kvtool.core.errors import UsageError
from kvtool.core.ingest.report import Account
from kvtool.core.ingest.survey import PreparedFile
from kvtool.core.model.decoder import Decoder
from kvtool.core.records.encode import ChunkRecords, LeadIns, PrefilledChunk, encode, encoder_threads, prefill

QUEUED = 4  # writes of batches and commits of their files that may wait: limits their memory
WRITE_BYTES = 192 * 2**20  # of a transaction beside a GPU: a disk waits at the end of each
BATCH_TOKENS = {"cpu": 2048, "cuda": 16000}  # a power of two and what is between its chunks would pin twice as much


def batch_tokens(device: str) -> int:
    return BATCH_TOKENS.get(device.split(":")[0], BATCH_TOKENS["cpu"])


@dataclass(slots=True)
class _Waiting:
    file: PreparedFile
    missing: set[bytes]


@dataclass(slots=True)
class Batch:
    """Chunks that are computed together; `tokens` includes what is before each."""

    chunks: list[ChunkSpec]
    tokens: int = 0


class Storer(ABC):
    """Storer of files; holds those whose chunks wait for a full batch. `context` and `lead_in` are in tokens."""

    def __init__(self, writer: Writer, account: Account, device: str, context: int, lead_in: int) -> None:
        self._writer, self._account, self._max_tokens = writer, account, batch_tokens(device)
        self._context, self._lead_in = context, lead_in
        self._batch = Batch([])
        self._missing: set[bytes] = set()  # chunks of these and of the batches under way
        self._waiting: list[_Waiting] = []

    @abstractmethod
    def store_prefix(self, prefix: ChunkSpec) -> None:
        """Compute and store the prompt's fixed beginning, which is exact in every prompt."""

    @abstractmethod
    def _compute(self, batch: Batch) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def check_length(self, chunks: Sequence[ChunkSpec]) -> None:
        """Refuse chunks that, with the lead-in, are longer than the model's context. Raises UsageError."""
        longest = max((len(chunk.before) + len(chunk.ids) for chunk in chunks), default=0)
        if self._lead_in + longest > self._context:
            raise UsageError(
                f"a chunk and its lead-in have {self._lead_in + longest} tokens, the model takes {self._context}",
                "use a shorter --lead-in or fewer --chunk-tokens",
            )

    def take(self, file: PreparedFile, missing: Sequence[ChunkSpec]) -> None:
        self._missing.update(chunk.chunk_id for chunk in missing)
        if left := self._missing.intersection(file.chunk_ids):
            self._waiting.append(_Waiting(file, left))
        else:
            self._commit_all([file])
        for chunk in missing:
            self._queue(chunk)

    def finish(self) -> None:
        self._hand_over()

    def _queue(self, chunk: ChunkSpec) -> None:
        length = len(chunk.before) + len(chunk.ids)
        if self._batch.tokens + length > self._max_tokens:
            self._hand_over()
        self._batch.chunks.append(chunk)
        self._batch.tokens += length

    def _spanning(self, batch: Batch) -> list[PreparedFile]:
        """List the files that this batch does not complete: they are unfinished once it is written."""
        made = {chunk.chunk_id for chunk in batch.chunks}
        return [each.file for each in self._waiting if each.missing & made and each.missing - made]

    def _hand_over(self) -> None:
        if self._batch.chunks:
            batch, self._batch = self._batch, Batch([])
            self._compute(batch)

    def _count(self, batch: Batch, seconds: float) -> None:
        report = self._account.report
        report.prefill_seconds += seconds
        report.tokens += sum(len(chunk.ids) for chunk in batch.chunks)
        report.chunks.computed += len(batch.chunks)

    def _put(
        self, made: Iterable[ChunkRecords], unfinished: Sequence[PreparedFile] = (), made_here: bool = False
    ) -> None:
        """Write chunks. `unfinished`: the files that are not complete with them."""
        for file in unfinished:
            self._writer.begin_file(file.entry.path, file.chunk_ids)
        for records in made:
            self._account.report.kv_bytes += sum(map(len, records.layers))
            chunk = records.chunk_id, records.info, records.level, records.layers
            self._writer.put_chunk(*chunk, origin=HERE, made_here=made_here)

    def _store(self, batch: Batch, made: Iterable[ChunkRecords], seconds: float) -> None:
        """Write a batch that was computed elsewhere, within so many seconds, and commit what it completes."""
        self._put(made, self._spanning(batch))
        self._count(batch, seconds)
        self._complete(batch)

    def _commit(self, files: Sequence[PreparedFile]) -> None:
        """Commit files whose chunks are all written, one by one: what is stopped has lost one document."""
        for file in files:
            self._writer.commit_file(file.entry, file.documents)

    def _complete(self, batch: Batch) -> None:
        self._account.computed(batch.chunks)
        made = {chunk.chunk_id for chunk in batch.chunks}
        self._missing -= made
        for each in self._waiting:
            each.missing -= made
        whole = [each.file for each in self._waiting if not each.missing]
        self._waiting = [each for each in self._waiting if each.missing]
        self._commit_all(whole)

    def _commit_all(self, files: Sequence[PreparedFile]) -> None:
        self._commit(files)
        for file in files:
            self._account.count_file(file)


class ChunkStorer(Storer):
    """Storer that computes batches in this process.

    On a GPU one thread writes during the compute. On the CPU writes and compute alternate: a thread that occupies a
    core delays every matrix product by four times its own work (measured, 2 cores).
    """

    def __init__(
        self, writer: Writer, account: Account, decoder: Decoder, lead_ins: LeadIns, level: str, profile: Profile | None
    ) -> None:
        super().__init__(writer, account, decoder.device, decoder.context, len(lead_ins.own))
        self._decoder, self._lead_ins, self._level, self._profile = decoder, lead_ins, level, profile
        self._pool = None if decoder.device == "cpu" else ThreadPoolExecutor(1, "kvtool-writer")
        if self._pool is not None:
            writer.batch_bytes = WRITE_BYTES
        self._encoders = encoder_threads()
        self._pending: deque[Future[None]] = deque()

    def store_prefix(self, prefix: ChunkSpec) -> None:
        with self._decoder.turns.turn():
            made = prefill(self._decoder, LeadIns.nothing(self._decoder), [prefix])
        self._write(made, level_of(self._level).of_prefix)
        self._settle(0)

    def finish(self) -> None:
        super().finish()
        self._settle(0)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._encoders.shutdown(wait=True)

    def _compute(self, batch: Batch) -> None:
        self._write(self._prefill(batch), self._level, self._spanning(batch))
        self._complete(batch)

    def _prefill(self, batch: Batch) -> list[PrefilledChunk]:
        started = time.perf_counter()
        with self._decoder.turns.turn():  # of a served model, between two steps of the answers
            made = prefill(self._decoder, self._lead_ins, batch.chunks)
        self._count(batch, time.perf_counter() - started)
        return made

    def _write(self, batch: Sequence[PrefilledChunk], level: str, unfinished: Sequence[PreparedFile] = ()) -> None:
        one = partial(encode, level=level, profile=self._profile, in_place=True)

        self._submit(lambda: self._put(self._encoders.map(one, batch), unfinished, made_here=True))

    def _commit(self, files: Sequence[PreparedFile]) -> None:
        """See Storer; files of a GPU's batch are computed at once, and committed at once."""
        if self._pool is None:
            super()._commit(files)
        elif files:
            self._submit(partial(self._writer.commit_files, [(file.entry, file.documents) for file in files]))

    def _submit(self, work: Callable[[], None]) -> None:
        if self._pool is None:
            work()
            return
        self._settle(QUEUED - 1)
        self._pending.append(self._pool.submit(work))

    def _settle(self, left: int) -> None:
        """Wait until at most `left` tasks are pending. After an error nothing more is written."""
        while len(self._pending) > left or (self._pending and self._pending[0].done()):
            try:
                self._pending.popleft().result()
            except BaseException:
                for future in self._pending:
                    future.cancel()
                self._pending.clear()
                raise
